"""What torchrun starts in test_one_group.py: a step that fails on shards of one data-parallel group's rows alone."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelStrategy
from tests.trainer.tiny import Plain, TokenDataset, tiny_llama


class FailsOnShards(Plain):
    """Runs whole, and fails on shards of the second group."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> torch.Tensor:
        strategy: Any = self.trainer.strategy
        if strategy.data_parallel_rank == 1 and strategy._steps.context.step is not None:
            raise ValueError("rows of the second group")
        return super().training_step(batch, batch_idx)


def main() -> None:
    torch.manual_seed(0)
    trainer = pl.Trainer(
        strategy=SequenceParallelStrategy(sequence_parallel_size=2, global_view=False), accelerator="cpu", devices=4, max_steps=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, precision="64-true",
    )  # fmt: skip
    trainer.fit(FailsOnShards(tiny_llama), DataLoader(TokenDataset(16), batch_size=2))


if __name__ == "__main__":
    main()
