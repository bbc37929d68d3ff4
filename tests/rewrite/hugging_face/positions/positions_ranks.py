"""What each rank runs in test_position_ids.py, and the same on one process in plain torch: models that count their tokens' positions."""

from __future__ import annotations

import traceback
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.preflight.preflight_ranks import LLAMA
from tests.trainer.tiny import VOCAB, Plain, quiet_trainer

BERT = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, pad_token_id=1,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
GPT2 = dict(
    n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0
)  # fmt: skip
OPT = dict(
    hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=32,
    dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
DECODER = dict(
    d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48, max_position_embeddings=64, dropout=0.0,
    attention_dropout=0.0, activation_dropout=0.0, is_decoder=True, is_encoder_decoder=False,
)  # fmt: skip


def build(kind: str, head: str, **options: Any) -> nn.Module:
    """A tiny model whose positions matter: fresh weights alone would hide a shift of them."""
    import transformers
    from transformers import CONFIG_MAPPING

    torch.manual_seed(3)
    vocabulary = {} if "text_config" in options else {"vocab_size": VOCAB}
    config = CONFIG_MAPPING[kind](**vocabulary, **options)
    model: nn.Module = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def build_of_pictures() -> nn.Module:
    """BLIP-2, which fails without a picture, around an OPT, which counts by its mask."""
    vision = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=8
    )
    qformer = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, encoder_hidden_size=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    text = {"model_type": "opt", "vocab_size": VOCAB, **OPT}
    options = dict(num_query_tokens=len(PLACES), image_token_index=PLACEHOLDER)
    return build("blip-2", "ImageTextToText", vision_config=vision, qformer_config=qformer, text_config=text, **options)


# Of a picture's tokens, which no random id is, in each row.
PLACEHOLDER, PLACES = 3, (13, 14)

BUILDS: dict[str, Any] = {
    "llama": partial(build, "llama", "CausalLM", **LLAMA),
    "gpt2": partial(build, "gpt2", "CausalLM", **GPT2),
    "phi": partial(build, "phi", "CausalLM", **LLAMA),
    "bert": partial(build, "bert", "MaskedLM", **BERT),
    "roberta": partial(build, "roberta", "MaskedLM", **BERT),
    "xmod": partial(build, "xmod", "MaskedLM", **BERT, languages=["en_XX"], default_language="en_XX"),
    "mpnet": partial(build, "mpnet", "MaskedLM", **BERT),
    "esm": partial(build, "esm", "MaskedLM", **BERT, mask_token_id=2, position_embedding_type="absolute", token_dropout=False),
    "opt": partial(build, "opt", "CausalLM", **OPT),
    "bart decoder": partial(build, "bart", "CausalLM", **DECODER),
    "trocr": partial(build, "trocr", "CausalLM", **DECODER),
    "roformer": partial(build, "roformer", "MaskedLM", **BERT, embedding_size=32),
    "nystromformer": partial(build, "nystromformer", "MaskedLM", **BERT),
    "blip-2": build_of_pictures,
}  # fmt: skip


class Model(Plain):
    """Hands its batch on to the model, as users do; or with embeddings, or positions, of its own."""

    def __init__(self, name: str, kind: str = "batch") -> None:
        super().__init__(None)
        self.model, self.kind = BUILDS[name](), kind
        self.words = nn.Embedding(VOCAB, 32) if kind == "embeddings" else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        given = {name: value for name, value in batch.items() if name != "targets"}
        if self.kind == "embeddings":
            given["inputs_embeds"] = self.words(given.pop("input_ids"))
        if self.kind == "ids alone":
            given = {"input_ids": given["input_ids"]}
        logits = self.model(**given).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def rows_of(padding: str, length: int = 32, positions: str = "", *, pictures: bool = False) -> list[dict[str, Tensor]]:
    """Two rows padded on one side, the ids of RoBERTa's padding there; RoBERTa's padding id inside a row, too, without padding."""
    g = torch.Generator().manual_seed(1)
    rows = []
    for missing in (5, 11):
        ids = torch.randint(4, VOCAB, (length,), generator=g)
        mask = torch.ones(length, dtype=torch.long)
        if padding == "left":
            mask[:missing] = 0
        if padding == "right":
            mask[length - missing :] = 0
        targets = torch.randint(4, VOCAB, (length,), generator=g).masked_fill(mask == 0, -100)
        ids = ids.masked_fill(mask == 0, 1)
        rows.append({"input_ids": ids, "attention_mask": mask, "targets": targets})
        if pictures:
            ids[list(PLACES)] = PLACEHOLDER
            rows[-1]["pixel_values"] = torch.randn(3, 8, 8, generator=g)
        if padding == "none":
            ids[missing] = 1
            rows[-1].pop("attention_mask")
        if positions == "packed":
            rows[-1]["position_ids"] = torch.cat([torch.arange(missing), torch.arange(length - missing)])
        if positions == "shifted":
            rows[-1]["position_ids"] = torch.arange(length) + 3
    return rows


def one_process(name: str, padding: str = "none", kind: str = "batch", length: int = 32, **_: Any) -> dict[str, Any]:
    """Return loss and gradients of plain transformers."""
    torch.set_num_threads(1)
    module = Model(name, kind).double()
    rows = rows_of(padding, length, _.get("positions", ""), pictures=name == "blip-2")
    loss = module.training_step({key: torch.stack([row[key] for row in rows]) for key in rows[0]}, 0)
    loss.backward()
    return {
        "loss": float(loss.detach()),
        "grads": {n: p.grad for n, p in module.named_parameters() if p.grad is not None},
    }


def sharded(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit one step of each case under the strategy; the raw gradients, or the refusal."""
    return [_sharded(**case) for case in cases]


def _sharded(
    name: str, padding: str = "none", kind: str = "batch", length: int = 32, positions: str = "", strategy: Any = None, world: int = 2
) -> dict[str, Any]:  # fmt: skip
    module = Model(name, kind)
    module.on_before_optimizer_step = partial(_keep, module)  # type: ignore[method-assign]
    try:
        trainer = quiet_trainer(world, strategy=strategy or {}, max_steps=1)
        rows = rows_of(padding, length, positions, pictures=name == "blip-2")
        trainer.fit(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
        error = ""
    except SequenceParallelError as refusal:
        error = str(refusal)
    except Exception as other:
        error = f"NOT BY NAME {other!r}: {traceback.format_exc()}"
    cumsums = (torch.cumsum is torch._C._VariableFunctions.cumsum, "cumsum" in vars(Tensor))
    return {
        "error": error,
        "losses": module.losses,
        "grads": module.raw_grads[-1] if module.raw_grads else {},
        "own": cumsums,
    }


def _keep(module: Model, optimizer: Any) -> None:
    full = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    module.raw_grads.append({n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in full.items()})


def handed_by_order(names: list[str]) -> list[str]:
    """Count by order whatever the model does, and return what the preflight says."""
    from unittest.mock import patch

    from lightning_sp.rewrite.hugging_face import interface
    from lightning_sp.rewrite.hugging_face.positions.position_count import PositionCount, PositionCounts

    by_order = PositionCounts(PositionCount.BY_ORDER, PositionCount.BY_ORDER)
    with patch.object(interface, "position_counts", lambda _: by_order):
        return [_sharded(name, "left", strategy={"preflight": True})["error"] for name in names]
