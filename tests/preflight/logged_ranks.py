"""What each rank runs in test_logged_numbers.py: a fit whose step logs an accuracy, by hand or by a metric."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp.reductions import batch_mean
from tests.flows.tiny import Tuned, llama
from tests.instruments.told import told
from tests.trainer.tiny import plain_trainer, quiet_trainer

_VOCAB, _LENGTH = 48, 16


class Logged(Tuned):
    """Logs an accuracy of its targets, whose number later batches have less of in the second half.

    by hand             of its own tokens
    synchronized        with the mean over ranks, which is right while each rank has as many targets
    none at first       of a step that predicts nothing right until it has learned
    of the batch        by lightning_sp.reductions
    late                by hand, from the second batch on alone
    """

    def __init__(self, kind: str) -> None:
        super().__init__(llama(num_hidden_layers=1))
        self.kind, self.shown = kind, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch["shift_labels"]
        logits = self.model(batch["input_ids"]).logits
        predicted = logits.argmax(-1)
        if self.kind == "none at first" and batch_idx == 0:
            predicted = predicted - _VOCAB
        right, is_target = predicted == labels, labels != -100
        if self.kind == "of the batch":
            self.log("accuracy", batch_mean(right.float(), is_target))
        elif self.kind != "late" or batch_idx > 0:
            self.log("accuracy", right[is_target].float().mean(), sync_dist=self.kind == "synchronized")
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    def on_train_batch_end(self, *args: Any) -> None:
        self.shown += [float(self.trainer.callback_metrics["accuracy"])] if self.trainer.callback_metrics else []


def _batches() -> Iterator[dict[str, Tensor]]:
    # Few ids, of which an untrained model predicts some; both parts of the first batch have each of them as often.
    drawn = torch.Generator().manual_seed(0)
    for index in range(5):
        ids = torch.randint(0, 3, (2, _LENGTH // 4), generator=drawn).repeat(1, 4)
        labels = ids.clone()
        labels[:, _LENGTH - 2 * index :] = -100
        yield {"input_ids": ids, "shift_labels": labels}


def fit(kind: str, world: int, strategy: dict[str, Any]) -> tuple[list[float], bool, list[str]]:
    """Return the accuracies, whether the step was in the global view at the end, and what was said."""
    torch.manual_seed(3)
    module = Logged(kind)
    with told() as said:
        trainer = quiet_trainer(world, strategy=strategy) if world > 1 else plain_trainer(max_epochs=1)
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader([*_batches()], batch_size=None))
    return module.shown, bool(getattr(trainer.strategy, "sees_whole_sequences", False)), list(said)
