"""What each rank runs in test_attention_dropout.py; returns plain values."""

from __future__ import annotations

import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.preflight.preflight_ranks import LLAMA, hf
from tests.rewrite.mask_models import HEADS, Attending
from tests.rewrite.rewrite_ranks import GPT_OSS
from tests.trainer.tiny import VOCAB, Plain, TokenDataset, quiet_trainer


class Dropping(Attending):
    """Two equal attentions in a row with dropout on their weights, checkpointed by the user or not."""

    def __init__(self, p: float = 0.3, how: str = "") -> None:
        super().__init__()
        self.p, self.how = p, how
        self.equal: list[bool] = []

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        if not self.how:
            return self._twice(q, k, v)
        reentrant = self.how == "reentrant"
        first = checkpoint(self._once, q, k, v, use_reentrant=reentrant, preserve_rng_state=self.how != "forgetting")
        return first + checkpoint(self._once, q, k, v, use_reentrant=reentrant)

    def _twice(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first, second = self._once(q, k, v), self._once(q, k, v)
        self.equal.append(torch.equal(first, second))
        return first + second

    def _once(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = self.p if self.training or self.how == "evaluating" else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)


class Encoder(nn.Module):
    """torch's own encoder, dropout on attention weights alone."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCAB, 32), nn.Embedding(128, 32)
        layer = nn.TransformerEncoderLayer(32, HEADS, 48, dropout=0.0, batch_first=True)
        layer.self_attn.dropout = p
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(input_ids) + self.positions(position_ids)))


def llama(config: dict[str, Any], checkpointed: bool = False) -> nn.Module:
    model = hf("llama", **config)
    if checkpointed:
        model.gradient_checkpointing_enable()
    return model


def gpt_oss() -> nn.Module:
    model = hf("gpt_oss", **GPT_OSS, attention_dropout=0.3)
    model.set_experts_implementation("eager")
    return model


DROPPED = {**LLAMA, "num_hidden_layers": 2, "attention_dropout": 0.3}
BUILDS: dict[str, Any] = {
    "none": partial(Dropping, 0.0),
    "plain": Dropping,
    "checkpointed": partial(Dropping, how="checkpointed"),
    "reentrant": partial(Dropping, how="reentrant"),
    "forgetting": partial(Dropping, how="forgetting"),
    "evaluating": partial(Dropping, how="evaluating"),
    "all": partial(Dropping, 1.0),
    "encoder": Encoder,
    "llama": partial(llama, DROPPED),
    "llama checkpointed": partial(llama, DROPPED, True),
    "gpt oss": gpt_oss,
}


class Model(Plain):
    def __init__(self, build: str) -> None:
        super().__init__(None)
        torch.manual_seed(3)
        self.model = BUILDS[build]()
        self.evaluated: list[float] = []

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        output = self.model(batch["input_ids"], position_ids=batch["position_ids"])
        return output if isinstance(output, Tensor) else output.logits

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten())
        self.evaluated.append(float(loss))

    def configure_optimizers(self) -> Any:
        # Hugging Face's norms and rotary embeddings compute in float32: a weight moved by 1e-17 would round another way.
        return torch.optim.SGD(self.parameters(), lr=0.0 if hasattr(self.model, "config") else 0.1)


def run(world: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit each case: its losses, gradients and validation losses, or the refusal."""
    return [_run(world, **case) for case in cases]


def _run(
    world: int, build: str, strategy: Any = None, micro: int = 4, validate: bool = False, resume: str = "", save: str = "", **options: Any
) -> dict[str, Any]:  # fmt: skip
    torch.manual_seed(7)
    module = Model(build)
    torch.manual_seed(11)
    data = DataLoader(TokenDataset(8), batch_size=micro)
    try:
        trainer = quiet_trainer(
            world, strategy={"preflight": False, **(strategy or {})}, limit_val_batches=int(validate), **options
        )
        trainer.fit(module, data, data if validate else None, ckpt_path=resume or None)
        if save:
            trainer.save_checkpoint(Path(save))
        error = ""
    except SequenceParallelError as refusal:
        error = str(refusal)
    except Exception as other:
        error = f"NOT BY NAME {other!r}: {traceback.format_exc()}"
    return {
        "error": error,
        "losses": module.losses,
        "grads": module.raw_grads,
        "evaluated": module.evaluated,
        "equal": getattr(module.model, "equal", []),
    }
