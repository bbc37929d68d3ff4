"""What runs in the ranks: data flows of users whose samples are dealt over data-parallel groups, and in plain Lightning."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, Subset
from torchmetrics import MeanMetric, SumMetric

from lightning_sp import SequenceParallelError
from tests.trainer.tiny import Plain, TokenDataset, _full, plain_trainer, quiet_trainer, tiny_llama


class Rows(Plain):
    """Counts what it is given."""

    def __init__(self) -> None:
        super().__init__(tiny_llama)
        self.rows, self.mean = SumMetric(), MeanMetric()
        self.kept: list[Any] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loader = self.trainer.train_dataloader
        if loader is not None:
            found = (
                isinstance(loader.dataset, Subset),
                loader.batch_size,
                loader.drop_last,
                getattr(loader, "note", None),
            )
            self.kept.append(found)
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        first = batch["input_ids"][:, 0].double()
        self.rows.update(len(first))
        self.mean.update(first.mean())
        self.kept.append(float(self.mean.compute()))  # which remembers it
        self.log("rows", self.rows)
        self.log("first", first.mean(), batch_size=len(first), sync_dist=True)
        self.log("together", self.trainer.strategy.reduce(first.sum(), reduce_op="sum"), reduce_fx="sum", batch_size=1)

    def on_validation_epoch_end(self) -> None:
        self.log("mean", self.mean.compute())

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return batch["input_ids"][:, 0]


class Stream(IterableDataset):
    """Samples without an index."""

    def __iter__(self) -> Any:
        data = TokenDataset(5)
        return (data[i] for i in range(5))


class AtOnce(TokenDataset):
    """Gives the samples of a batch at once."""

    def __getitems__(self, indices: list[int]) -> Any:
        return torch.utils.data.default_collate([self[i] for i in indices])


class LoaderOfUser(DataLoader):
    """Whose arguments nobody knows."""


def _as_it_is(batch: Any) -> Any:
    return batch


def loader(kind: str) -> DataLoader[Any]:
    """Return a loader of an evaluation; 5 samples unless its name says otherwise."""
    data = TokenDataset(5)
    match kind:
        case "dropped":
            return DataLoader(data, batch_size=2, drop_last=True)
        case "some":
            return DataLoader(data, batch_size=1, sampler=SequentialSampler(range(3)))
        case "stream":
            return DataLoader(Stream(), batch_size=1)
        case "batches":
            return DataLoader(data, batch_sampler=[[0, 1], [2, 3], [4]])
        case "order":
            return DataLoader(data, sampler=[3, 1, 2])
        case "own":
            return LoaderOfUser(data, batch_size=2)
        case "at once":
            return DataLoader(AtOnce(5), batch_size=2, collate_fn=_as_it_is)
        case _:  # one batch: a group has none
            return DataLoader(data, batch_sampler=[[0, 1]])


def _trainer(world: int, strategy: dict[str, Any] | None, **options: Any) -> Any:
    torch.manual_seed(3)
    options = {"num_sanity_val_steps": 0, **options}
    return plain_trainer(**options) if strategy is None else quiet_trainer(world, strategy=strategy, **options)


def evaluate(world: int, strategy: dict[str, Any] | None, kinds: list[str]) -> list[Any]:
    """Return of each kind of loader what a validation logs, and predictions."""
    found = []
    for kind in kinds:
        module, trainer = Rows(), _trainer(world, strategy)
        [logged] = trainer.validate(module, loader(kind), verbose=False)
        # Lightning makes a batch sampler anew for predictions, and cannot do so of a list.
        predicts = kind not in ("batches", "few")
        predicted = [each.tolist() for each in trainer.predict(module, loader(kind))] if predicts else []
        found.append((dict(logged), predicted))
    return found


def side_by_side(world: int, strategy: dict[str, Any] | None) -> str:
    """Return why loaders side by side are refused."""
    loaders = CombinedLoader({"a": DataLoader(TokenDataset(2)), "b": DataLoader(TokenDataset(6))}, "max_size_cycle")
    try:
        _trainer(world, strategy).validate(Rows(), loaders, verbose=False)
    except SequenceParallelError as error:
        return str(error)
    return ""


def trained(world: int, strategy: dict[str, Any] | None) -> tuple[Any, list[Any]]:
    """Return what a step reads of its loader, and what a hook reads of its data set."""
    module, given = Rows(), DataLoader(Subset(TokenDataset(8), range(4)), batch_size=2, drop_last=True)
    given.note = "mine"
    trainer = _trainer(world, strategy, max_epochs=1)
    trainer.fit(module, given)
    data = _trainer(world, strategy, max_epochs=1)
    data.fit(other := Rows(), DataLoader(TokenDataset(4), batch_size=2))
    last = data.train_dataloader.dataset[-1]["input_ids"].tolist()
    return module.kept, [last, other.kept[0][0], module.losses]


class Monitored(Plain):
    """Logs a number of its own samples, by which a run ends."""

    def __init__(self) -> None:
        super().__init__(tiny_llama)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten())
        self.log("val_loss", loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def stopped(world: int, strategy: dict[str, Any] | None) -> tuple[int, list[float]]:
    """Return the epochs of a run that ends when the loss of a validation of two samples is larger; one group's is from the first on."""
    module = Monitored()
    trainer = _trainer(world, strategy, max_epochs=4, callbacks=[EarlyStopping("val_loss", patience=0)])
    data, micro = TokenDataset(8), 2 if strategy is None else 1
    trainer.fit(module, DataLoader(Subset(data, [2, 2]), batch_size=micro), DataLoader(Subset(data, [2, 5])))
    return trainer.current_epoch, module.losses


class ByHand(Plain):
    """A loss that is no cross entropy: groups are averaged, those of fillers left out."""

    def __init__(self, automatic: bool) -> None:
        super().__init__(tiny_llama)
        self.automatic_optimization = automatic

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.logits(batch)
        loss = logits.square().mean() + logits.log_softmax(-1)[..., 3].mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


def by_hand(world: int, strategy: dict[str, Any] | None, automatic: bool, accumulated: int) -> dict[str, Tensor]:
    """Return the weights behind an epoch of seven samples, two in a step."""
    module = ByHand(automatic)
    trainer = _trainer(world, strategy, max_epochs=1, accumulate_grad_batches=accumulated)
    trainer.fit(module, DataLoader(TokenDataset(7), batch_size=2 if strategy is None else 1))
    return {name: _full(each.detach()).clone() for name, each in module.named_parameters()}


def gathered(world: int, strategy: dict[str, Any] | None) -> str:
    """Return why tensors of unequally many samples are not gathered."""
    trainer = _trainer(world, strategy)

    class Gathers(Rows):
        def on_validation_epoch_end(self) -> None:
            self.all_gather(torch.zeros(1 + self.trainer.strategy.data_parallel_rank))

    try:
        trainer.validate(Gathers(), DataLoader(TokenDataset(2)), verbose=False)
    except SequenceParallelError as error:
        return str(error)
    return ""
