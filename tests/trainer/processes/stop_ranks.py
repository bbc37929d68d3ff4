"""What runs in the ranks: a fit that a rank stops by itself, somewhere."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from lightning_sp.errors import SequenceParallelError
from tests.trainer.tiny import Plain, TokenDataset, plain_trainer, quiet_trainer, tiny_llama

AT_BATCH, BATCHES = 1, 4


class Stops(Plain):
    """Stops in a hook, on the ranks that are said."""

    def __init__(self, where: str, ranks: tuple[int, ...]) -> None:
        super().__init__(tiny_llama)
        self.where, self.stopping = where, ranks

    def stop(self, where: str, batch_idx: int = AT_BATCH) -> None:
        last = self.where == "on_train_batch_end, last"
        if self.where.partition(",")[0] == where and batch_idx == (BATCHES - 1 if last else AT_BATCH):
            self.trainer.should_stop |= self.global_rank in self.stopping

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.stop("training_step", batch_idx)
        loss = super().training_step(batch, batch_idx)
        self.log(
            "of_epoch", loss.detach(), on_step=False, on_epoch=True, sync_dist=True
        )  # ranks meet at an epoch's end
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.stop("on_train_batch_end", batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", super().training_step(batch, batch_idx))

    def on_validation_end(self) -> None:
        self.stop("on_validation_end")

    def on_train_epoch_end(self) -> None:
        self.stop("on_train_epoch_end")

    def on_train_start(self) -> None:
        self.stop("on_train_start")


WHERE = (
    "on_train_start", "training_step", "on_train_batch_end", "on_train_batch_end, last", "on_validation_end", "on_train_epoch_end",
)  # fmt: skip


def fit(world: int, where: str, ranks: tuple[int, ...], strategy: Any, options: Any = None) -> tuple[str, int]:
    """Return what was refused, and the optimizer steps."""
    module = Stops(where, ranks)
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, **(options or {})}
    trainer = quiet_trainer(world, strategy=strategy, **options) if strategy is not None else plain_trainer(**options)
    rows, size = TokenDataset(BATCHES * 2), 2 // (strategy or {}).get("data_parallel_size", 1)
    try:
        validated = DataLoader(rows, batch_size=size) if where == "on_validation_end" else None
        trainer.fit(module, DataLoader(rows, batch_size=size), validated)
    except SequenceParallelError as error:
        return str(error), trainer.global_step
    return "", trainer.global_step
