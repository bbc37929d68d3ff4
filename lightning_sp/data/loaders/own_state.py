"""The state of a training loader that keeps its own: torchdata's `StatefulDataLoader`, or any with `state_dict` and `load_state_dict`.

read      1    2    3    4    5          Lightning fetches ahead, so the loader has read more than was trained:
trained   1    2    3                    what a checkpoint stores is the state from after batch 3, noted when it was read
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from lightning_sp.data.loaders.deal import RandomStream, random_states
from lightning_sp.data.loaders.workers import prepare_workers

# Step boundaries that a checkpoint may still ask for: the micro-batch in progress and one that was fetched ahead lie behind the last trained.
_NUM_KEPT = 4


# What our loaders give Lightning as their state: it takes a resume within an epoch for exact then. No checkpoint holds it.
KEPT_BY_CURSOR = {"position_kept_by": "lightning_sp"}


class OwnState:
    """The states that one rank's loader has had of late.

    Args:
        loader: the user's, not yet iterated.
        step_batches: batches of an optimizer step; a checkpoint stores no other boundary.
    """

    def __init__(self, loader: Any, step_batches: int) -> None:
        self.loader, self.step_batches = loader, step_batches
        self._noted: dict[int, dict[str, Any]] = {}
        self._last: dict[str, Any] | None = None
        self._before_epoch: dict[str, Any] | None = None

    @property
    def is_kept(self) -> bool:
        """Return whether the loader keeps a state."""
        return all(callable(getattr(self.loader, name, None)) for name in ("state_dict", "load_state_dict"))

    def begin_epoch(self) -> None:
        """Forget the epoch before, but for how it ended."""
        self._noted, self._before_epoch = {}, self._last

    def note(self, count: int) -> None:
        """Keep the loader's state from after `count` batches of the epoch."""
        generator = getattr(self.loader, "generator", None)
        drawn = generator.get_state() if isinstance(generator, torch.Generator) else None
        self._last = {"state": copy.deepcopy(self.loader.state_dict()), "generator": drawn}
        if count % self.step_batches == 0:
            self._noted[count] = self._last
            for old in sorted(self._noted)[:-_NUM_KEPT]:
                del self._noted[old]

    def stored(self, count: int, *, finished: bool) -> dict[str, Any] | None:
        """Return what a checkpoint stores; None where the loader is to be read from its start.

        Args:
            count: batches of the epoch that were trained.
            finished: nothing of the epoch is left.
        """
        if finished or not count:
            return self._last if finished else self._before_epoch
        return self._noted.get(count)

    def restored(self, stored: dict[str, Any], count: int) -> Iterator[Any]:
        """Return the batches that follow a stored state: those left in its epoch, after none of a new one all of them."""
        prepare_workers(self.loader)
        self.loader.load_state_dict(copy.deepcopy(stored["state"]))
        self._last = self._before_epoch = stored
        self._noted = {count: stored} if count else {}
        # The run before has drawn what is drawn here at its epoch's start.
        with RandomStream(random_states()):
            source: Iterator[Any] = iter(self.loader)
        if stored["generator"] is not None:
            self.loader.generator.set_state(stored["generator"])
        return source if count else self._not_empty(iter(self.loader))

    def _not_empty(self, source: Iterator[Any]) -> Iterator[Any]:
        """Give a new epoch's batches where a loader tells the end of the one before only now."""
        is_empty = True
        for batch in source:
            is_empty = False
            yield batch
        if is_empty:
            yield from self.loader
