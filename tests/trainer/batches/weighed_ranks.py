"""What runs in the ranks: losses of a group's own rows, where groups have unequally many rows or a filler."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.trainer.tiny import VOCAB, Plain, TokenDataset, _full, plain_trainer, quiet_trainer, tiny_llama


class Samples(TokenDataset):
    """Samples with a target at each token, which a step may look up; as a pair where asked."""

    def __init__(self, size: int, pairs: bool) -> None:
        super().__init__(size)
        self.pairs = pairs

    def __getitem__(self, index: int) -> Any:
        row = self.tokens[index]
        found = {"input_ids": row[:-1], "shift_labels": row[1:], "position_ids": torch.arange(len(row) - 1)}
        return (found["input_ids"], found["shift_labels"]) if self.pairs else found


def _beside(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.1 * logits.logsumexp(-1).square().mean()


def _gathered(logits: Tensor, targets: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).mean()


def _one_hot(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.softmax(-1) - F.one_hot(targets, VOCAB)).square().sum(-1).mean(1).mean()


def _added_up(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.square().sum() / 1e4


def _of_all(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# Losses by name; of pairs the batch is a list, without names.
LOSSES = {
    "beside": _beside,
    "gathered": _gathered,
    "one hot": _one_hot,
    "added up": _added_up,
    "pairs": _gathered,
    "of all": _of_all,
}


class Weighed(Plain):
    """A loss of the group's own rows."""

    def __init__(self, kind: str, automatic: bool) -> None:
        super().__init__(tiny_llama)
        self.kind, self.automatic_optimization = kind, automatic

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.kind == "pairs":
            assert type(batch) is list
            ids, targets = batch
        else:
            ids, targets = batch["input_ids"], batch["shift_labels"]
        loss = LOSSES[self.kind](self.model(ids, torch.arange(ids.shape[1]).expand_as(ids)), targets)
        self.log("loss", loss, sync_dist=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SideBySide(Weighed):
    """The losses of two loaders' batches in one step, of which one has no filler where the other has."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = [batch[name]["input_ids"] for name in "ab"]
        logits = [self.model(each, torch.arange(each.shape[1]).expand_as(each)) for each in ids]
        pairs = zip(logits, (batch[name]["shift_labels"] for name in "ab"), strict=True)
        return sum(LOSSES[self.kind](each, targets) for each, targets in pairs)


def side_by_side(world: int, strategy: dict[str, Any] | None, kind: str) -> dict[str, Tensor] | str:
    """Return the weights behind an epoch of two loaders, of three and four samples, or why they are refused."""
    torch.manual_seed(3)
    module, options = SideBySide(kind, True), {"max_epochs": 1, "num_sanity_val_steps": 0}
    trainer = plain_trainer(**options) if strategy is None else quiet_trainer(world, strategy=strategy, **options)
    size = 2 if strategy is None else 1
    loaders = {name: DataLoader(Samples(rows, False), batch_size=size) for name, rows in (("a", 3), ("b", 4))}
    try:
        trainer.fit(module, CombinedLoader(loaders, "max_size_cycle"))
    except SequenceParallelError as error:
        return str(error)
    return {name: _full(each.detach()).clone() for name, each in module.named_parameters()}


def fit(
    world: int, strategy: dict[str, Any] | None, kinds: list[str], rows: int, automatic: bool = True
) -> list[tuple[dict[str, Tensor], float]]:
    """Return of each kind of loss the weights behind an epoch of some rows, four in a step, and what the last one has logged."""
    found = []
    for kind in kinds:
        torch.manual_seed(3)
        module, options = Weighed(kind, automatic), {"max_epochs": 1, "num_sanity_val_steps": 0}
        trainer = plain_trainer(**options) if strategy is None else quiet_trainer(world, strategy=strategy, **options)
        trainer.fit(module, DataLoader(Samples(rows, kind == "pairs"), batch_size=4 if strategy is None else 2))
        weights = {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
        found.append((weights, float(trainer.callback_metrics["loss"])))
    return found
