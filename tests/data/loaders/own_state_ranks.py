"""Fits over loaders that keep their own state, stopped and resumed: what each rank runs in test_own_state.py."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

from lightning_sp import SequenceParallelError
from tests.checkpoint.checkpoint_ranks import Heard, Trained
from tests.trainer.tiny import TokenDataset, _full, quiet_trainer


class Rows(Dataset[Any]):
    """Samples that carry their number; those that were read are counted."""

    def __init__(self, size: int) -> None:
        self.rows, self.read = TokenDataset(size), []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return {**self.rows[index], "number": torch.tensor(index)}


class Stream(IterableDataset):
    """A group's share of the same samples, in an order that its own state tells: no seed or epoch gives it again."""

    def __init__(self, size: int, share: slice) -> None:
        self.samples, self.share = Rows(size), share
        self.next, self.passes = 0, 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        order = np.random.RandomState(self.passes).permutation(len(self.samples))[self.share]
        while self.next < len(order):
            self.next += 1
            yield self.samples[int(order[self.next - 1])]
        self.next, self.passes = 0, self.passes + 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next, "passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next, self.passes = state["next"], state["passes"]


class Loader:
    """A loader of a user's own: no DataLoader, without a length, which goes on where it was."""

    def __init__(self, size: int, rows: int, share: slice, strange: bool = False) -> None:
        self.stream, self.rows, self.strange = Stream(size, share), rows, strange

    def __iter__(self) -> Iterator[Any]:
        rows: list[Any] = []
        for row in self.stream:
            rows.append(row)
            if len(rows) == self.rows:
                yield torch.utils.data.default_collate(rows)
                rows = []

    def state_dict(self) -> dict[str, Any]:
        return {**self.stream.state_dict(), **({"strange": object()} if self.strange else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state)


def build(kind: str, size: int, rows: int, strategy: dict[str, Any], workers: int) -> tuple[Any, Rows]:
    """Return a loader of a kind, and what counts its reads."""
    groups = strategy.get("data_parallel_size", 1)
    share = slice(dist.get_rank() * groups // dist.get_world_size() if dist.is_initialized() else 0, None, groups)
    if kind in ("own", "strange"):
        loader = Loader(size, rows, share, kind == "strange")
        return loader, loader.stream.samples
    from torchdata.stateful_dataloader import StatefulDataLoader

    if kind == "stream":
        stream = Stream(size, share)
        return StatefulDataLoader(stream, batch_size=rows, num_workers=workers), stream.samples
    data = Rows(size)
    generator = torch.Generator().manual_seed(7) if kind == "generator" else None
    return StatefulDataLoader(
        data, batch_size=rows, shuffle=kind != "sequential", generator=generator, num_workers=workers
    ), data


def fit(
    kind: str,
    strategy: dict[str, Any],
    *,
    save: str = "",
    resume: str = "",
    save_after: int = 0,
    steps: int = 8,
    size: int = 12,
    rows: int = 1,
    accumulate: int = 2,
    workers: int = 0,
    anew: bool = False,
) -> dict[str, Any]:
    """Fit over two epochs and a part of a third, save after a step or at the end, or resume; what was trained on, read, and said.

    With `anew` each epoch has a loader of its own.
    """
    pl.seed_everything(5, verbose=False)
    module = Trained(dropout=0.2, layers=1)
    if resume:
        torch.manual_seed(99)
    loader, data = build(kind, size, rows, strategy, workers)
    heard = Heard()
    module.save_after = (save_after, save) if save_after else None
    trainer = quiet_trainer(
        dist.get_world_size() if dist.is_initialized() else 1,
        strategy={"preflight": False, **strategy},
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        reload_dataloaders_every_n_epochs=int(anew),
    )
    if anew:
        module.train_dataloader = lambda: build(kind, size, rows, strategy, workers)[0]  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, None if anew else loader, ckpt_path=resume or None)
            if save and not save_after:
                trainer.save_checkpoint(save)
        except SequenceParallelError as error:
            return {"error": str(error)}
        finally:
            said = heard.stop()
    return {
        "error": "",
        "losses": module.losses,
        "numbers": module.numbers,
        "before": module.saved.get("numbers", []),
        "read": len(data.read),
        "reads": trainer.strategy.sequence_mesh.sequence_rank == 0,
        "weights": {name: _full(each.detach()).clone() for name, each in module.named_parameters()},
        "said": "\n".join([said, *(str(each.message) for each in warned)]),
    }


def several(calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[dict[str, Any]]:
    return [fit(*args, **options) for args, options in calls]
