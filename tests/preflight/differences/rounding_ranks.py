"""What each rank runs in test_rounding.py; returns plain values."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as functional
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from lightning_sp.reductions import sequence_mean
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama
from tools.flows.ranks import alarm
from tools.flows.registry import Flow


def said(topic: str, name: str, factor: float = 1.0) -> dict[str, Any]:
    """Run a flow in bf16-mixed; return whether it is refused.

    Args:
        topic: of the flow.
        name: of the flow.
        factor: of what attention gives on shards, where it is in bfloat16: a kernel that is wrong in that dtype alone.
    """
    import lightning_sp.rewrite.hugging_face.attention as rewrite

    own = rewrite.attend

    def wrong(*args: Any, **options: Any) -> torch.Tensor:
        out = own(*args, **options)
        return out * factor if out.dtype == torch.bfloat16 else out

    patched = mock.patch.object(rewrite, "attend", wrong) if factor != 1 else nullcontext()
    # The global view has the model's own attention, and is right.
    on_parts = mock.patch.object(Flow, "strategy_options", {"global_view": factor == 1 and "auto"})
    with tempfile.TemporaryDirectory() as folder, patched, on_parts:
        return alarm(Flow(topic, name), "ulysses 2", folder, "bf16-mixed")


class Angles(Plain):
    """Angles between rows' distances are to be a frozen model's: of two rows they are 0 or 1 whatever the weights are, and the loss is 0."""

    def __init__(self, kind: str) -> None:
        super().__init__(tiny_llama)
        self.kind, self.teacher = kind, tiny_llama().requires_grad_(False)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.kind == "small":  # a loss that is too small by its unit, and is not one device's on shards
            logits = self.logits(batch).cumsum(1).flatten(0, 1)
            return 1e-20 * functional.cross_entropy(logits, batch["shift_labels"].flatten())
        inputs = batch["input_ids"], batch["position_ids"]
        return functional.mse_loss(_angles(self.model(*inputs)), _angles(self.teacher(*inputs)))


def _angles(hidden: torch.Tensor) -> torch.Tensor:
    rows = sequence_mean(hidden)
    units = functional.normalize(rows[None] - rows[:, None], dim=2)
    return torch.bmm(units, units.transpose(1, 2)).view(-1)


def fit(kind: str, rows: int) -> str:
    """Train on batches of so many rows; return what was refused."""
    torch.manual_seed(3)
    options = {"ulysses_size": 2, "global_view": False}
    try:
        quiet_trainer(2, strategy=options, max_steps=5).fit(Angles(kind), DataLoader(TokenDataset(20), rows))
    except SequenceParallelError as error:
        return str(error)
    return ""
