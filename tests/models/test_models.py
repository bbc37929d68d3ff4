"""The models are plain and right: shapes, causality, positions, initial weights, loss and metrics."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_sp.errors import SequenceParallelError
from lightning_sp.models import CausalLM, GPTConfig, HuggingFaceConfig, LlamaConfig, init_weights
from lightning_sp.models.causal_lm import token_chunks
from lightning_sp.models.llama import rotary_angles, rotate
from lightning_sp.models.schedule import warmup_cosine

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`"),
    # Lightning 2.6's own call of torch's pytree.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]

LLAMA = LlamaConfig(vocab_size=32, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=48)
GPT = GPTConfig(vocab_size=32, max_positions=64, dim=32, num_layers=2, num_heads=4)
HUGGING_FACE = HuggingFaceConfig(
    "llama",
    {
        "vocab_size": 32,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
    },
)
BIASED = dataclasses.replace(LLAMA, qk_bias=0.5)
CONFIGS = [LLAMA, BIASED, GPT, HUGGING_FACE]
OURS = [LLAMA, BIASED, GPT]


def batch(num_rows=2, length=16, seed=0):
    tokens = torch.randint(0, 32, (num_rows, length + 1), generator=torch.Generator().manual_seed(seed))
    labels = tokens[:, 1:].clone()
    labels[:, -2:] = -100
    positions = torch.arange(length).expand(num_rows, -1)
    return {"input_ids": tokens[:, :-1], "position_ids": positions, "shift_labels": labels}


def built(config):
    torch.manual_seed(0)
    module = CausalLM(config, max_steps=10)
    module.configure_model()
    return module


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_logits_depend_on_no_later_token(config):
    module, given = built(config).double(), batch()
    logits = module(given["input_ids"], given["position_ids"])
    assert logits.shape == (2, 16, 32)
    assert logits.dtype == torch.float64
    changed = given["input_ids"].clone()
    changed[:, 9] = (changed[:, 9] + 1) % 32
    other = module(changed, given["position_ids"])
    assert torch.equal(logits[:, :9], other[:, :9])
    assert not torch.allclose(logits[:, 9:], other[:, 9:])


@pytest.mark.parametrize("config", OURS, ids=lambda c: type(c).__name__)
def test_positions_are_those_given(config):
    """A shard's logits need its own positions: others change a GPT's, and a Llama's by their differences."""
    module, given = built(config).double(), batch()
    logits = module(given["input_ids"], given["position_ids"])
    stretched = module(given["input_ids"], given["position_ids"] * 3)
    assert (logits - stretched).abs().max() > 1e-4


@pytest.mark.parametrize("config", OURS, ids=lambda c: type(c).__name__)
def test_weights_drawn_after_the_meta_device_equal_those_drawn_at_once(config):
    torch.manual_seed(7)
    expected = config.build().state_dict()
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    torch.manual_seed(7)
    init_weights(model)
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("config", OURS, ids=lambda c: type(c).__name__)
def test_untrained_loss_is_that_of_guessing(config):
    module, given = built(config), batch()
    loss = F.cross_entropy(
        module(given["input_ids"], given["position_ids"]).flatten(0, 1), given["input_ids"].flatten()
    )
    assert loss.item() == pytest.approx(math.log(32), abs=0.1)


def test_llama_equals_hugging_faces():
    """Same weights, same logits: attention, rotary positions, norms and SwiGLU are Llama's."""
    ours, theirs = LLAMA.build().double(), HUGGING_FACE.build().double()
    names = {"model.embed_tokens": ours.embedding, "model.norm": ours.norm, "lm_head": ours.head}
    for index, block in enumerate(ours.layers):
        parts = {
            "input_layernorm": block.attention_norm,
            "post_attention_layernorm": block.feed_forward_norm,
            "self_attn.q_proj": block.attention.query,
            "self_attn.k_proj": block.attention.key,
            "self_attn.v_proj": block.attention.value,
            "self_attn.o_proj": block.attention.output,
            "mlp.gate_proj": block.feed_forward.gate,
            "mlp.up_proj": block.feed_forward.up,
            "mlp.down_proj": block.feed_forward.down,
        }
        names |= {f"model.layers.{index}.{name}": module for name, module in parts.items()}
    for name, module in names.items():
        nn.init.normal_(module.weight, std=0.3)
        theirs.get_submodule(name).weight.data.copy_(module.weight.data)
    theirs.config.rms_norm_eps = LLAMA.norm_eps
    for module in theirs.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = LLAMA.norm_eps
    given = batch()
    expected = theirs(input_ids=given["input_ids"], position_ids=given["position_ids"]).logits
    got = ours(given["input_ids"], given["position_ids"])
    # Theirs computes norms and rotary angles in float32.
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


def test_rotary_angles_are_wide_and_rotation_depends_on_distance_alone():
    positions = torch.tensor([[0, 5]])
    cos, sin = rotary_angles(positions, head_dim=8, theta=10000.0, dtype=torch.bfloat16)
    assert cos.dtype == sin.dtype == torch.float32
    cos, sin = rotary_angles(positions, head_dim=8, theta=10000.0, dtype=torch.float64)
    far_cos, far_sin = rotary_angles(positions + 1000, head_dim=8, theta=10000.0, dtype=torch.float64)
    x = torch.randn(1, 1, 2, 8, dtype=torch.float64)
    near, far = rotate(x, cos, sin)[0, 0], rotate(x, far_cos, far_sin)[0, 0]
    assert cos.dtype == torch.float64
    assert torch.allclose(near[0] @ near[1], far[0] @ far[1], atol=1e-10, rtol=0)
    assert rotate(x.bfloat16(), cos, sin).dtype == torch.bfloat16


def test_dropout_acts_in_training_alone():
    model = dataclasses.replace(GPT, dropout=0.5).build()
    given = batch()
    inputs = given["input_ids"], given["position_ids"]
    assert not torch.equal(model(*inputs), model(*inputs))
    model.eval()
    assert torch.equal(model(*inputs), model(*inputs))


def test_warmup_rises_and_the_cosine_ends_at_its_ratio():
    factor = warmup_cosine(warmup_steps=4, max_steps=12, min_ratio=0.1)
    assert [factor(step) for step in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert factor(8) == pytest.approx(0.55)
    assert factor(12) == factor(99) == pytest.approx(0.1)
    assert warmup_cosine(warmup_steps=0, max_steps=1, min_ratio=0.0)(0) == 1.0


def test_token_chunks_cover_the_sequence_within_the_limit():
    logits, labels = torch.randn(2, 7, 5), torch.randint(0, 5, (2, 7))
    pieces = list(token_chunks(logits, labels, max_logits=20))
    assert [piece[0].shape[1] for piece in pieces] == [2, 2, 2, 1]
    assert torch.equal(torch.cat([piece[0] for piece in pieces], 1), logits)
    assert torch.equal(torch.cat([piece[1] for piece in pieces], 1), labels)
    assert len(list(token_chunks(logits, labels, max_logits=1))) == 7


def trainer_of(tmp_path, **options):
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tmp_path,
    }
    return Trainer(**defaults | options)


def loader(*batches):
    return DataLoader(list(batches), batch_size=None)


def test_validation_weighs_by_tokens(tmp_path, monkeypatch):
    """Batches of unequal valid tokens: loss and perplexity are those of all tokens at once, in chunks too."""
    monkeypatch.setattr("lightning_sp.models.causal_lm.MAX_METRIC_LOGITS", 100)
    module = built(LLAMA)
    full, sparse = batch(seed=1), batch(seed=2)
    sparse["shift_labels"][:, 3:] = -100
    trainer = trainer_of(tmp_path)
    trainer.validate(module, loader(full, sparse), verbose=False)
    losses = [
        F.cross_entropy(
            module(b["input_ids"], b["position_ids"]).flatten(0, 1), b["shift_labels"].flatten(), reduction="sum"
        )
        for b in (full, sparse)
    ]
    num_tokens = sum(int((b["shift_labels"] != -100).sum()) for b in (full, sparse))
    mean = float(sum(loss.detach() for loss in losses)) / num_tokens
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(mean, rel=1e-5)
    assert float(trainer.callback_metrics["val_perplexity"]) == pytest.approx(math.exp(mean), rel=1e-5)


def test_predict_returns_log_probabilities_of_the_labels(tmp_path):
    module, given = built(GPT), batch()
    (result,) = trainer_of(tmp_path).predict(module, loader(given))
    expected = torch.log_softmax(module(given["input_ids"], given["position_ids"]), -1)
    labels = given["shift_labels"]
    picked = expected.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
    assert torch.allclose(result["log_probs"], picked, atol=1e-6)


def test_fit_lowers_the_loss_and_decays_matrices_alone(tmp_path):
    torch.manual_seed(0)
    module, given = CausalLM(LLAMA, lr=1e-2, warmup_steps=2), batch()
    trainer = trainer_of(tmp_path, max_steps=12, log_every_n_steps=1)
    trainer.fit(module, loader(*[given] * 12))
    assert float(trainer.callback_metrics["train_loss"]) < math.log(32) - 0.5
    decays = {
        p.ndim >= 2: group["weight_decay"] for group in trainer.optimizers[0].param_groups for p in group["params"]
    }
    assert decays == {True: 0.1, False: 0.0}
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3)


def test_hyperparameters_are_plain():
    module = CausalLM(HUGGING_FACE, max_steps=5)
    assert dict(module.hparams)["model_options"]["options"]["hidden_size"] == 32
    assert all(isinstance(value, int | float | str | dict) for value in dict(module.hparams).values())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LlamaConfig(dim=36, num_heads=4), r"dim=36 over num_heads=4.*multiple of 8"),
        (lambda: LlamaConfig(num_heads=8, num_kv_heads=3), r"num_heads=8, num_kv_heads=3.*divisor of 8"),
        (lambda: GPTConfig(dim=30, num_heads=4), r"dim=30 over num_heads=4.*multiple of 4"),
        (lambda: LlamaConfig(num_heads=0), r"num_heads=0: must be a whole number of at least 1"),
        (lambda: LlamaConfig(vocab_size="257"), r"vocab_size='257': must be a whole number"),
        (lambda: GPTConfig(num_layers=True), r"num_layers=True: must be a whole number"),
        (lambda: CausalLM(LLAMA, lr="fast"), r"lr='fast': must be a number of at least 0"),
        (lambda: CausalLM(LLAMA, weight_decay=float("nan")), r"weight_decay=nan: must be a number"),
        (lambda: CausalLM(LLAMA, warmup_steps=1.5), r"warmup_steps=1.5: must be a whole number"),
        (lambda: CausalLM(LLAMA, max_steps="all"), r"max_steps='all': must be a whole number"),
        (lambda: HuggingFaceConfig(), r"model_type=None, pretrained=None: give one of the two"),
        (lambda: HuggingFaceConfig("lama").build(), r"'lama' is no architecture.*did you mean 'llama'"),
        (
            lambda: HuggingFaceConfig("llama", {"hiden_size": 32}).build(),
            r"no option 'hiden_size'; did you mean 'hidden_size'",
        ),
        (lambda: CausalLM("llama"), r"not str"),
        (lambda: CausalLM(LLAMA)(torch.zeros(1, 1), torch.zeros(1, 1)), r"before its model was built"),
    ],
)
def test_refusals_name_what_was_given_and_the_fix(make, message):
    with pytest.raises(SequenceParallelError, match=message):
        make()


def test_a_schedule_without_an_end_is_refused(tmp_path):
    with pytest.raises(SequenceParallelError, match=r"max_steps=None, Trainer\(max_steps=-1\)"):
        trainer_of(tmp_path, max_epochs=1).fit(CausalLM(LLAMA), loader(batch()))


def test_equal_biases_start_the_attention_at_near_tokens():
    config = dataclasses.replace(LLAMA, qk_bias=2.0)
    attention = config.build().layers[0].attention
    assert [each.bias.detach()[0].item() for each in (attention.query, attention.key)] == [2.0, 2.0]
    assert LLAMA.build().layers[0].attention.query.bias is None
    cos, sin = rotary_angles(torch.arange(64)[None], head_dim=config.head_dim, theta=500.0, dtype=torch.float64)
    bias = rotate(torch.full((1, 1, 64, config.head_dim), 2.0, dtype=torch.float64), cos, sin)[0, 0]
    scores = bias @ bias[0]
    assert scores.argmax() == 0
    assert scores[0] == pytest.approx(2.0**2 * config.head_dim)
    assert bool((scores[:4].diff() < 0).all())
