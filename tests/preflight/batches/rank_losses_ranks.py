"""Runs in which one rank alone makes another loss in one step, which no trial repeats."""

from __future__ import annotations

from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp.errors import SequenceParallelError
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, steps_of, tiny_llama


class OfOneRank(Plain):
    """Rank 1 makes something else of its loss in one step."""

    def __init__(self, step: int, kind: str) -> None:
        super().__init__(tiny_llama)
        self.step, self.kind = step, kind

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if steps_of(self.trainer) == self.step and self.global_rank == 1:
            return loss * float("nan") if self.kind == "nan" else loss + 0.5
        return loss


def ends(step: int, kind: str) -> tuple[int, str]:
    """Return after how many steps a run of five ends, and with what."""
    module = OfOneRank(step, kind)
    trainer = quiet_trainer(2, strategy={"global_view": "auto"}, max_steps=5)
    try:
        trainer.fit(module, DataLoader(TokenDataset(10), batch_size=2))
    except SequenceParallelError as error:
        return trainer.global_step, str(error)
    return trainer.global_step, ""
