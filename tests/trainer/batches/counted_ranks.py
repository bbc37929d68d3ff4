"""What runs in the ranks: losses that are divided by a count of their group's own, alike in the first batch alone."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.trainer.tiny import Plain, TokenDataset, _full, plain_trainer, quiet_trainer, tiny_llama

IGNORED = -100


class LaterIgnored(TokenDataset):
    """Samples of which those behind the first four have ignored targets, each another number of them; the last two have ignored ones alone."""

    def __getitem__(self, index: int) -> Any:
        row = self.tokens[index]
        targets = row[1:].clone()
        if index >= 4:
            targets[: 32 if index >= 10 else index * 11 % 31] = IGNORED
        return {"input_ids": row[:-1], "shift_labels": targets, "position_ids": torch.arange(len(row) - 1)}


def _losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and which count."""
    counts = targets != IGNORED
    return -logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1), counts


def _masked(logits: Tensor, targets: Tensor) -> Tensor:
    each, counts = _losses(logits, targets)
    return (each * counts).sum() / counts.sum()


def _clamped(logits: Tensor, targets: Tensor) -> Tensor:
    each, counts = _losses(logits, targets)
    return (each * counts).sum() / counts.sum().clamp(min=1)


def _plus_one(logits: Tensor, targets: Tensor) -> Tensor:
    """Divide by counts with something added, one device's and a group's alike."""
    each, counts = _losses(logits, targets)
    rare = counts & (targets % 3 == 0)
    return (
        2 * each.mean()
        - 0.5 * (each * counts).sum() / (counts.sum() + 1)
        + (each * rare).sum() * (2 / (rare.sum().item() + 0.5))
    )


def _root(logits: Tensor, targets: Tensor) -> Tensor:
    """Divide by what is no count with something added, though one crop looks so."""
    each, counts = _losses(logits, targets)
    return (each * counts).sum() / counts.sum().clamp(min=1).sqrt()


def _times(logits: Tensor, targets: Tensor) -> Tensor:
    each, counts = _losses(logits, targets)
    return 0.5 * (each * counts).sum() * (1 / max(1, int(counts.sum())))


def _selected(logits: Tensor, targets: Tensor) -> Tensor:
    each, counts = _losses(logits, targets)
    return each[counts].mean()


def _terms(logits: Tensor, targets: Tensor) -> Tensor:
    each, counts = _losses(logits, targets)
    rare = counts & (targets % 3 == 0)
    own = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return own + 0.1 * (logits.logsumexp(-1).square() * counts).sum() / counts.sum() - 0.2 * each[rare].mean()


def _by_rows(logits: Tensor, targets: Tensor) -> Tensor:
    each, counts = _losses(logits, targets)
    rows = [(e * c).sum() / c.sum().clamp(min=1) for e, c in zip(each, counts, strict=True)]
    return sum(rows) / len(rows)


def _added_up(logits: Tensor, targets: Tensor) -> Tensor:
    each, counts = _losses(logits, targets)
    return (each * counts).sum() / 300


def _drawn(logits: Tensor, targets: Tensor) -> Tensor:
    """Count what the step draws."""
    each, _ = _losses(logits, targets)
    counts = torch.rand(each.shape) < 0.4
    return (each * counts).sum() / counts.sum()


LOSSES = {
    "masked": _masked,
    "clamped": _clamped,
    "plus one": _plus_one,
    "root": _root,
    "times": _times,
    "selected": _selected,
    "terms": _terms,
    "by rows": _by_rows,
    "added up": _added_up,
    "drawn": _drawn,
}


class WeighedRows(LaterIgnored):
    """Samples of which each has a weight, alike in the first four."""

    def __getitem__(self, index: int) -> Any:
        return {**super().__getitem__(index), "importance": torch.tensor(1.0 if index < 4 else 1.0 + index % 5)}


class Counted(Plain):
    """Makes its loss by hand."""

    def __init__(self, kind: str, automatic: bool) -> None:
        super().__init__(tiny_llama)
        self.kind, self.automatic_optimization = kind, automatic

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.kind == "rows":
            each, counts = _losses(self.logits(batch), batch["shift_labels"])
            rows = (each * counts).sum(1) / counts.sum(1).clamp(min=1)
            loss = (rows * batch["importance"]).sum() / batch["importance"].sum()
        else:
            loss = LOSSES[self.kind](self.logits(batch), batch["shift_labels"])
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    world: int,
    strategy: dict[str, Any] | None,
    kinds: list[str],
    rows: int = 12,
    automatic: bool = True,
    accumulated: int = 1,
) -> list[tuple[dict[str, Tensor], list[str]]]:
    """Return of each kind of loss the weights behind an epoch of some rows, four in a step, and what was warned of."""
    found = []
    for kind in kinds:
        torch.manual_seed(3)
        module = Counted(kind, automatic)
        options = {"max_epochs": 1, "num_sanity_val_steps": 0, "accumulate_grad_batches": accumulated}
        trainer = plain_trainer(**options) if strategy is None else quiet_trainer(world, strategy=strategy, **options)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            data = WeighedRows(rows) if kind == "rows" else LaterIgnored(rows)
            trainer.fit(module, DataLoader(data, batch_size=4 if strategy is None else 2))
        weights = {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
        found.append((weights, [str(each.message) for each in told if "data-parallel" in str(each.message)]))
    return found
