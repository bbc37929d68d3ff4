"""Hooks at a batch's end that read what a step returned, and its batch: what each rank runs in test_batch_ends.py."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.trainer.lightning_ranks import trainer_of
from tests.trainer.tiny import Plain, TokenDataset, _full, quiet_trainer, tiny_gpt


class Reads(pl.Callback):
    """An accuracy of each batch, from outputs and batch, in the callback's own lists."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Any]] = {"train": [], "validation": [], "test": [], "predict": []}

    def _read(self, kind: str, outputs: Any, batch: Any) -> None:
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs
        right = (logits.argmax(-1) == batch["shift_labels"]).float().mean()
        ids = torch.as_tensor(batch["input_ids"] + 0)
        self.seen[kind] += [right.item(), logits.sum().item(), float(ids.sum()), tuple(logits.shape), tuple(ids.shape)]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._read("train", outputs, batch)
        assert outputs["loss"].dim() == 0

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._read("validation", outputs, batch)
        self.log("accuracy", self.seen["validation"][-5], on_epoch=True, batch_size=len(batch["input_ids"]))

    def on_test_batch_end(self, *args: Any) -> None:
        self._read("test", args[2], args[3])

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._read("predict", outputs, batch)


class Ignores(pl.Callback):
    """Reads neither: nothing is gathered for it."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.ran = True


class Returning(Plain):
    def __init__(self, number: bool = False) -> None:
        super().__init__(tiny_gpt)
        self.number = number
        self.module_saw: list[Any] = []

    def _step(self, batch: Any) -> Any:
        logits = self.logits(batch)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        self.losses.append(float(loss.detach()))
        if self.number:
            return {"loss": loss, "logits": logits, "largest": logits.amax((0, 1))}
        return {"loss": loss, "logits": logits}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._step(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self._step(batch)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self._step(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.logits(batch)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.module_saw.append(
            (float(outputs["loss"]), float(outputs["logits"].mean()), int(batch["shift_labels"].sum()))
        )


def run(
    strategy: dict[str, Any] | None, world: int, length: int, number: bool = False, micro: int = 4
) -> dict[str, Any]:
    """Fit, test and predict under plain Lightning (None) or ours; what hooks saw."""
    torch.manual_seed(3)
    module, reads, data = Returning(number), Reads(), TokenDataset(8, length)
    rows = [
        {"input_ids": data.tokens[i, :-1], "position_ids": torch.arange(length), "shift_labels": data.tokens[i, 1:]}
        for i in range(8)
    ]
    trainer = trainer_of(strategy, world, callbacks=[reads, Ignores()])
    loader = DataLoader(rows, batch_size=micro)  # type: ignore[arg-type]
    try:
        trainer.fit(module, loader, loader)
        trainer.test(module, loader, verbose=False)
        trainer.predict(module, loader, return_predictions=False)
    except SequenceParallelError as error:
        return {"error": str(error)}
    hooks = [name for owner in (module, reads) for name in vars(owner) if name.endswith("_batch_end")]
    weights = {n: _full(p.detach()).clone() for n, p in module.named_parameters()}
    logged = float(trainer.callback_metrics.get("accuracy", torch.zeros(())))
    return {
        "error": "",
        "seen": reads.seen,
        "module": module.module_saw,
        "left": hooks,
        "weights": weights,
        "logged": logged,
    }


class EachRow(Plain):
    """Returns each row's loss, which its hook keeps."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        each = F.cross_entropy(self.logits(batch).movedim(-1, 1), batch["shift_labels"], reduction="none")
        return {"loss": super().training_step(batch, batch_idx), "each": each.detach().mean(1)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rows += outputs["each"].tolist()


def each_row(world: int, strategy: dict[str, Any]) -> list[float]:
    """Return what a hook has been handed of each row."""
    torch.manual_seed(0)
    module: Any = EachRow(tiny_gpt)
    module.rows = []
    quiet_trainer(world, strategy=strategy).fit(module, DataLoader(TokenDataset(4), batch_size=2))
    return list(module.rows)
