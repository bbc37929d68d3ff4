"""What each rank runs in test_rewrite.py, and the same on one process in plain torch; returns plain values."""

from __future__ import annotations

import traceback
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from lightning_sp import SequenceParallelError, sharded_cross_entropy
from lightning_sp.attention import AttentionMask
from lightning_sp.layout import shard
from lightning_sp.rewrite.hugging_face import attention as layer_attention
from lightning_sp.rewrite.hugging_face import interface as hugging_face
from tests.preflight.preflight_ranks import LLAMA, hf
from tests.rewrite import mask_models
from tests.rewrite.mask_models import CustomMask, Explicit, Flex, Handed, Imported, PaddedEncoder, T5Encoder, built_by
from tests.trainer.tiny import VOCAB, Plain, TokenDataset, quiet_trainer, tiny_gpt

GPT2 = dict(
    n_embd=32, n_layer=1, n_head=4, n_positions=128, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0
)  # fmt: skip
TWO_LAYERS = {**LLAMA, "num_hidden_layers": 2}
GEMMA2 = {
    **TWO_LAYERS,
    "head_dim": 8,
    "pad_token_id": 0,
    "layer_types": ["full_attention"] * 2,
    "final_logit_softcapping": None,
}
WINDOWED = {**LLAMA, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
# What chooses its frequencies by the largest position: the whole of 32 tokens is beyond 20, a shard of 16 may not be.
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [2.0, 4.0, 8.0, 16.0],
    "original_max_position_embeddings": 20,
}  # fmt: skip
GEMMA3 = {
    **TWO_LAYERS, "head_dim": 8, "pad_token_id": 0, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9,
}  # fmt: skip
DEEPSEEK = {
    **TWO_LAYERS, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
    "first_k_dense_replace": 2,
}  # fmt: skip
GPT_OSS = {
    **TWO_LAYERS, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 9,
    "layer_types": ["full_attention", "sliding_attention"], "router_aux_loss_coef": 0.0,
}  # fmt: skip
LLAMA4 = {
    **TWO_LAYERS, "head_dim": 8, "attention_chunk_size": 12, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
    "num_local_experts": 2, "intermediate_size_mlp": 48, "moe_layers": [], "attn_temperature_tuning": False,
}  # fmt: skip
BY_LAYER = {
    **TWO_LAYERS, "head_dim": 8, "pad_token_id": 0, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64,
    "rope_parameters": {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0}},
}  # fmt: skip


class TorchEncoder(nn.Module):
    """torch's own encoder; positions from outside."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.embedding, self.positions = nn.Embedding(VOCAB, 32), nn.Embedding(128, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.positions(position_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype) if self.causal else None
        return self.head(self.encoder(x, mask=mask, is_causal=self.causal))


class TorchAttention(nn.Module):
    """nn.MultiheadAttention."""

    def __init__(self, need_weights: bool = False) -> None:
        super().__init__()
        self.need_weights = need_weights
        self.embedding, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.head(self.attention(x, x, x, need_weights=self.need_weights)[0])


class Masked(nn.Module):
    """Calls scaled_dot_product_attention with an option of choice."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.embedding, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids).unflatten(-1, (4, 8)).transpose(1, 2)
        options = dict(self.options)
        if options.pop("flat", False):
            return self.head(
                F.scaled_dot_product_attention(*(x.flatten(0, 1),) * 3).unflatten(0, (-1, 4)).transpose(1, 2).flatten(2)
            )
        keys = x[:, :, : options.pop("keys", x.shape[2])]
        return self.head(F.scaled_dot_product_attention(x, keys, keys, **options).transpose(1, 2).flatten(2))


def windowed_layers() -> nn.Module:
    """Layers that hand a window to their attention, in a model that asks for no mask of it."""
    model = hf("qwen2", **LLAMA, use_sliding_window=False)
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 16
    return model


def custom_mask(form: str, length: int = 32) -> nn.Module:
    window = 9 if form == "second window" else None
    return CustomMask(hf("mistral", **LLAMA, sliding_window=window), form, length)


def gpt_oss() -> nn.Module:
    """GPT-OSS with sinks that matter, and experts that compute in float64 too."""
    model = hf("gpt_oss", **GPT_OSS)
    model.set_experts_implementation("eager")
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.sinks)
    return model


def turned_rope() -> nn.Module:
    """A rotary embedding that returns its tokens last."""
    model = hf("llama", **LLAMA, rope_parameters=LONGROPE)
    rope, original = model.model.rotary_emb, model.model.rotary_emb.forward
    rope.forward = lambda x, position_ids: tuple(t.transpose(-2, -1) for t in original(x, position_ids))
    return model


FLEX = (
    "causal", "full", "whole", "documents", "by row and head", "alibi", "learned", "learned full", "learned attribute", "learned partial",
    "learned helper", "compiled", "gqa", "gqa unsaid", "lse", "kernel options", "blocks", "blocks of a shard", "chosen",
    "chosen by a shard", "chosen by one shard", "by head of a shard", "shard's documents", "other length", "called",
)  # fmt: skip
CUSTOM = ("and", "or", "whole tensor", "shard's tensor", "second window")
EXPLICIT = (
    "whole", "whole documents", "whole inverted", "alibi", "learned", "learned full", "learned of keys", "keys", "batch", "shard",
    "own queries", "other", "integers", "padding", "expanded padding", "lowest", "heads", "by position", "causal padding",
)  # fmt: skip
# transformers' own, of a model that is to be ours.
IMPLEMENTATIONS = ("sdpa", "flex_attention")
BUILDS: dict[str, Any] = {
    "gpt": tiny_gpt,
    "llama": partial(hf, "llama", **TWO_LAYERS),
    "llama tied": partial(hf, "llama", **LLAMA, tie_word_embeddings=True),
    "llama dynamic": partial(hf, "llama", **{**LLAMA, "max_position_embeddings": 20}, rope_parameters=DYNAMIC),
    "llama longrope": partial(hf, "llama", **LLAMA, rope_parameters=LONGROPE),
    "turned rope": turned_rope,
    "llama old dynamic": partial(
        hf, "llama", **{**LLAMA, "max_position_embeddings": 20}, rope_scaling={"type": "dynamic", "factor": 4.0}
    ),
    "deepseek": partial(hf, "deepseek_v3", **DEEPSEEK),
    "gpt oss": gpt_oss,
    "gemma3": partial(hf, "gemma3_text", **GEMMA3),
    "llama4": partial(hf, "llama4_text", **LLAMA4),
    "gemma3 by layer": partial(hf, "gemma3_text", **BY_LAYER),
    "gpt2": partial(hf, "gpt2", **GPT2),
    "qwen2": partial(hf, "qwen2", **LLAMA, use_sliding_window=False),
    "qwen2 window": partial(hf, "qwen2", **WINDOWED),
    "qwen2 windowed layers": windowed_layers,
    "qwen2 wide window": partial(hf, "qwen2", **{**WINDOWED, "sliding_window": 64}),
    "mistral": partial(hf, "mistral", **LLAMA, sliding_window=None),
    "mistral window": partial(hf, "mistral", **LLAMA, sliding_window=16),
    "gemma2": partial(hf, "gemma2", **GEMMA2, attn_logit_softcapping=None),
    # Before transformers 5.23 torch's function is its default, which drops the softcap: one device then trains another model, and the
    # preflight says so.
    "gemma2 softcap": partial(hf, "gemma2", **GEMMA2, attn_logit_softcapping=0.01, attn_implementation="eager"),
    "gpt neo": partial(hf, "gpt_neo", hidden_size=32, num_layers=1, num_heads=4, attention_types=[[["global"], 1]], max_position_embeddings=128),
    **{f"llama by {how}": partial(hf, "llama", **TWO_LAYERS, attn_implementation=how) for how in IMPLEMENTATIONS},
    **{f"gemma3 by {how}": partial(hf, "gemma3_text", **GEMMA3, attn_implementation=how) for how in IMPLEMENTATIONS},
    "encoder": partial(TorchEncoder, True),
    "full encoder": partial(TorchEncoder, False),
    "multihead": TorchAttention,
    "multihead weights": partial(TorchAttention, True),
    **{f"explicit {form}": partial(Explicit, form) for form in EXPLICIT},
    **{f"explicit {form} of 29": partial(Explicit, form, 29) for form in ("alibi", "learned full", "whole")},
    "padded encoder": PaddedEncoder,
    **{f"flex {form}": partial(Flex, form) for form in FLEX},
    **{f"flex {form} of 29": partial(Flex, form, 29) for form in ("documents", "positions", "chosen")},
    "imported": Imported,
    "held": partial(Imported, True),
    **{f"handed {how}": partial(Handed, how) for how in ("table", "partial", "default", "keyword")},
    **{f"custom {form}": partial(custom_mask, form) for form in CUSTOM},
    "custom whole tensor of 29": partial(custom_mask, "whole tensor", 29),
    "t5 encoder": T5Encoder,
    "cross": partial(Masked, keys=4),
    "flat": partial(Masked, flat=True),
    "scaled": partial(Masked, is_causal=True, scale=0.9, enable_gqa=True),
}  # fmt: skip


class Model(Plain):
    """A model with a training step of choice; built at once, so that its weights are those of plain torch."""

    def __init__(self, build: str, kind: str = "logits") -> None:
        super().__init__(None)
        torch.manual_seed(3)
        self.model = BUILDS[build]()
        self.kind = kind
        self.cross_entropy = sharded_cross_entropy
        self.evaluated: list[float] = []
        self.generated: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = getattr(self, f"_{self.kind}")(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def _logits(self, batch: Any) -> Tensor:
        output = self.model(batch["input_ids"], position_ids=batch["position_ids"])
        logits = output if isinstance(output, Tensor) else output.logits
        return self.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())

    def _masked(self, batch: Any) -> Tensor:
        given = {name: batch[name] for name in ("attention_mask", "pairs", "both") if name in batch}
        output = self.model(batch["input_ids"], position_ids=batch["position_ids"], **given)
        logits = output if isinstance(output, Tensor) else output.logits
        return self.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())

    def _short_4d(self, batch: Any) -> Tensor:
        tokens = batch["input_ids"].shape[1]
        mask = torch.ones(len(batch["input_ids"]), 1, tokens, tokens, dtype=torch.bool).tril()
        return self._masked({**batch, "attention_mask": mask})

    def _both_masks(self, batch: Any) -> Tensor:
        return self._masked({**batch, "both": True})

    def _no_positions(self, batch: Any) -> Tensor:
        return self.cross_entropy(self.model(batch["input_ids"]).logits.flatten(0, 1), batch["shift_labels"].flatten())

    def _hf_logits(self, batch: Any) -> Tensor:
        labels = batch.pop("shift_labels")
        return self.cross_entropy(self.model(**batch).logits.flatten(0, 1), labels.flatten())

    def _hf_loss(self, batch: Any) -> Tensor:
        return self.model(**batch).loss

    def _inner_mask(self, batch: Any) -> Tensor:
        mask = batch["input_ids"] % 3 != 0
        return self.cross_entropy(
            self.model(batch["input_ids"], attention_mask=mask).logits.flatten(0, 1), batch["shift_labels"].flatten()
        )

    def _inner_ones(self, batch: Any) -> Tensor:
        output = self.model(batch["input_ids"], attention_mask=torch.ones_like(batch["input_ids"]))
        return self.cross_entropy(output.logits.flatten(0, 1), batch["shift_labels"].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self._logits(batch)
        self.evaluated.append(float(loss))

    def on_validation_epoch_end(self) -> None:
        if hasattr(self.model, "generate"):
            self.generated.append(generate(self.model))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def generate(model: Any) -> list[int]:
    prompt = torch.arange(5)[None]
    return model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)[0].tolist()


def rows_of(kind: str = "", length: int = 32, packed: bool = False) -> list[dict[str, Tensor]]:
    """Two samples; a kind of batch of choice."""
    data = TokenDataset(2, length, packed)
    rows = [dict(data[i]) for i in range(2)]
    for row in rows:
        tokens, targets = row["input_ids"], row["shift_labels"]
        # Hugging Face's unshifted labels: labels[t + 1] is the target of t.
        labels = torch.cat([torch.tensor([-100]), targets[:-1]])
        if kind == "labels":
            row.clear()
            row.update(input_ids=tokens, labels=labels)
        if kind in ("both", "count"):
            targets[-1] = -100
            row.update(labels=labels)
        if kind == "ones":
            row.update(attention_mask=torch.ones_like(tokens))
        if kind == "padding":
            row.update(attention_mask=(torch.arange(length) < length - 3).long())
        if kind == "left padding":
            row.update(attention_mask=(torch.arange(length) >= 5 + 6 * len(tokens[tokens > 40]) % 17).long())
        if kind == "pairs":
            row.update(
                pairs=(torch.arange(length) % (3 + len(tokens[tokens > 40]) % 5) != torch.arange(length)[:, None] % 3)[
                    None
                ]
            )
        if kind == "4d":
            row.update(attention_mask=torch.ones(1, length, length, dtype=torch.bool).tril(-int(tokens[0]) % 3))
        if kind == "holes":
            row.update(attention_mask=(torch.arange(length) % 7 != 3).long())
    if kind == "count":
        count = sum(int((row["shift_labels"] != -100).sum()) for row in rows)
        for row in rows:
            row.update(num_items_in_batch=torch.tensor(count))
    return rows


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = default_collate(rows)
    if "num_items_in_batch" in batch:
        batch["num_items_in_batch"] = batch["num_items_in_batch"][0]
    return batch


def one_process(build: str, kind: str = "logits", data: Any = None, **_: Any) -> dict[str, Any]:
    """Return loss and gradients of plain torch and plain transformers."""
    torch.set_num_threads(1)
    module = Model(build, kind).double()
    module.cross_entropy = F.cross_entropy
    if build.startswith("gemma2"):
        module.model.set_attn_implementation(
            "eager"
        )  # in older transformers torch's function drops the softcap silently
    batch = collate(rows_of(**(data or {})))
    if (data or {}).get("packed") and hasattr(module.model, "config"):
        # Transformers' own documents: they need the cache off.
        module.model.config.use_cache = False
    if "labels" in batch and "shift_labels" in batch:
        batch.pop("shift_labels")
    with _plain_flex():
        loss = module.training_step(batch, 0)
        loss.backward()
    grads = {n: p.grad for n, p in module.named_parameters()}
    with torch.no_grad(), _plain_flex():
        evaluated = float(module._logits({"position_ids": None, **batch})) if kind == "logits" else 0.0
    tokens = generate(module.model) if hasattr(module.model, "generate") else []
    return {"loss": float(loss.detach()), "grads": grads, "evaluated": evaluated, "generated": tokens}


def _plain_flex() -> AbstractContextManager[Any]:
    return _both(
        *(patch.object(mask_models, name, mask_models.plain_flex) for name in ("flex_attention", "compiled_flex"))
    )


def sharded(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit one step of each case under the strategy; the loss, the raw gradients, or the refusal."""
    return [_sharded(**case) for case in cases]


def together(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As `sharded`, but one fit of the cases that differ in their data alone, a step each; the first one's batch has the preflight of any."""
    fits: dict[str, list[int]] = {}
    for i, case in enumerate(cases):
        strategy = {n: v for n, v in case.get("strategy", {}).items() if n != "preflight"}
        packed = bool((case.get("data") or {}).get("packed"))
        fits.setdefault(str({**case, "data": packed, "strategy": strategy}), []).append(i)
    found: dict[int, dict[str, Any]] = {}
    for numbers in fits.values():
        chosen = [cases[i] for i in numbers]
        checked = any(case.get("strategy", {}).get("preflight", False) for case in chosen)
        strategy = {**chosen[0].get("strategy", {}), "preflight": checked}
        more = [case.get("data") for case in chosen[1:]]
        answer = _sharded(**{**chosen[0], "strategy": strategy, "more": more})
        for step, i in enumerate(numbers):
            own = {
                "losses": answer["losses"][step - len(numbers) :][:1],
                "grads": answer["all grads"][step] if len(answer["all grads"]) == len(numbers) else {},
            }
            found[i] = {**answer, **own, "all grads": []}
    return [found[i] for i in range(len(cases))]


def _sharded(
    build: str, kind: str = "logits", data: Any = None, strategy: Any = None, fault: str = "", validate: bool = False, world: int = 2,
    more: tuple[Any, ...] | list[Any] = (),
) -> dict[str, Any]:  # fmt: skip
    module = Model(build, kind)
    declared = {"packed_documents": True} if (data or {}).get("packed") else {}
    strategy = {**declared, **(strategy or {}), "preflight": not fault and (strategy or {}).get("preflight", False)}
    samples = [row for each in (data, *more) for row in rows_of(**(each or {}))]
    loader = DataLoader(samples, batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    after: list[int] = []
    before = _globals(module)
    try:
        with FAULTS[fault]() if fault else nullcontext():
            trainer = quiet_trainer(world, strategy=strategy, max_steps=1 + len(more), limit_val_batches=int(validate))
            trainer.fit(module, loader, loader if validate else None)
        if validate and hasattr(module.model, "generate"):
            after = generate(module.model)
        error = ""
    except SequenceParallelError as refusal:
        error = str(refusal)
    except Exception as other:
        error = f"NOT BY NAME {other!r}: {traceback.format_exc()}"
    return {
        "error": error,
        "losses": module.losses,
        "grads": module.raw_grads[0] if module.raw_grads else {},
        "all grads": module.raw_grads if more else module.raw_grads[:1],
        "evaluated": module.evaluated,
        "generated": [*module.generated, after] if validate else [],
        "restored": [name for name, value in _globals(module).items() if value != before[name]],
    }


def _globals(module: Model) -> dict[str, Any]:
    """What a strategy replaces and must put back."""
    from transformers import AttentionInterface, AttentionMaskInterface

    return {
        "scaled_dot_product_attention": F.scaled_dot_product_attention,
        "cross_entropy": F.cross_entropy,
        "flex_attention": torch.nn.attention.flex_attention.flex_attention,
        "bound names": [
            getattr(mask_models, n) for n in ("flex_attention", "compiled_flex", "scaled_dot_product_attention")
        ],
        "held": getattr(module.model, "held", None),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "attention names": sorted(AttentionInterface._global_mapping),
        "mask names": sorted(AttentionMaskInterface._global_mapping),
        "implementation": getattr(getattr(module.model, "config", None), "_attn_implementation", None),
        "on the model": sorted(n for n in ("generate", "loss_function", "_loss_function") if n in vars(module.model)),
        "rotary": sum("forward" in vars(m) for m in module.model.modules() if "Rotary" in type(m).__name__),
        "staged": sum(type(vars(m).get("forward")).__name__ == "StagedAttention" for m in module.modules()),
        "hooks": sum("pass_position_ids" in repr(hook) for hook in module.model._forward_pre_hooks.values()),
    }


# ---- what goes silently wrong elsewhere, put back


def _local_edges() -> AbstractContextManager[Any]:
    """Labels shifted on the shard: the target at its edge is lost."""

    def edges(*args: Any, **options: Any) -> Tensor:
        labels = shard(*args, **options).clone()
        labels[:, -1] = -100
        return labels

    return patch("lightning_sp.rewrite.hugging_face.losses.given_labels.shard", edges)


def _no_documents() -> AbstractContextManager[Any]:
    return built_by(lambda *_, causal, **__: AttentionMask(causal))


def _no_positions() -> AbstractContextManager[Any]:
    return patch.object(hugging_face, "pass_position_ids", lambda *_: None)


def _shards_largest() -> AbstractContextManager[Any]:
    return patch.object(hugging_face, "wrap_rotary", lambda *_: None)


def _no_mask_function() -> AbstractContextManager[Any]:
    return patch.object(hugging_face, "requested_mask", lambda *_, **__: None)


def _no_window_check() -> AbstractContextManager[Any]:
    original = hugging_face.attention_forward

    def attention(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("sliding_window", None)
        return original(*args, **kwargs)

    return _both(_no_mask_function(), patch.object(hugging_face, "attention_forward", attention))


def _without(option: str) -> AbstractContextManager[Any]:
    """A softcap that caps nothing, sinks that take nothing."""
    original = layer_attention.attend

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        nothing = {"softcap": None} if option == "softcap" else {"sinks": kwargs["sinks"] * 0 - 1e4}
        return original(*args, **{**kwargs, **nothing})

    return patch.object(layer_attention, "attend", attend)


def _both(*managers: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    stack = ExitStack()
    for each in managers:
        stack.enter_context(each)
    return stack


FAULTS: dict[str, Any] = {
    "labels shifted after sharding": _local_edges,
    "document boundaries ignored": _no_documents,
    "positions not given": _no_positions,
    "RoPE by the shard's largest position": _shards_largest,
    "padding mask dropped": _no_mask_function,
    "sliding window as full causal": _no_window_check,
    "softcap dropped": partial(_without, "softcap"),
    "sinks dropped": partial(_without, "sinks"),
}


def two_models(world: int) -> list[Any]:
    """Two trainers with other layouts in one process, one after the other, then the first again, then one that cannot take its model."""
    first = Model("llama")
    loader = DataLoader(rows_of(), batch_size=2)
    one = quiet_trainer(world, strategy={"ring_size": world}, max_steps=1)
    one.fit(first, loader)
    second = Model("gpt2")
    two = quiet_trainer(world, strategy={"ulysses_size": world}, max_steps=1)
    two.fit(second, loader)
    one.fit_loop.max_epochs, one.fit_loop.epoch_loop.max_steps = 2, 2
    one.fit(first, loader)
    try:
        quiet_trainer(world, strategy={"compile": True}, max_steps=1).fit(first, loader)
        refusal = "NOT REFUSED"
    except SequenceParallelError as error:
        refusal = str(error)
    meshes = [each.strategy.sequence_mesh.describe() for each in (one, two)]
    return [first.losses, second.losses, meshes, refusal]


def evaluate_lengths(build: str, lengths: list[int], strategy: dict[str, Any], world: int) -> Any:
    """Validate on batches of one sample of these lengths; the losses of this rank's, or the refusal."""
    module = Model(build)
    rows = [rows_of(length=length)[0] for length in lengths]
    try:
        quiet_trainer(world, strategy=strategy).validate(module, DataLoader(rows, batch_size=1), verbose=False)  # type: ignore[arg-type]
    except SequenceParallelError as refusal:
        return str(refusal)
    return module.evaluated
