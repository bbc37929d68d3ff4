"""A loader that one rank of a sequence's group reads and sends to its peers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from lightning_sp import comm
from lightning_sp.data.batch.sharded_batch import is_sharded
from lightning_sp.data.loaders.coordinates import DataCoordinates
from lightning_sp.data.loaders.fillers import ignore_targets
from lightning_sp.errors import SequenceParallelError


class BroadcastLoader:
    """One rank of a sequence's group reads a loader and sends each batch to its peers, its end and its errors included.

    Without a group in its place every rank reads its own: batches that were sharded by hand.

    Data-parallel groups whose loaders end at different times go on together: those that have ended repeat their last batch without targets,
    until all have.

    Args:
        loader: the user's; iterated on the reading rank alone.
        place: this rank's.

    `skip` micro-batches of the next epoch are read and discarded: the position that a checkpoint stored.
    """

    def __init__(self, loader: Iterable[Any], place: DataCoordinates) -> None:
        self.loader, self.place = loader, place
        self.fillers_from: int | None = None
        self.skip = 0

    def __len__(self) -> int:
        """Return the length of the user's loader."""
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # Lightning turns epochs by `sampler`/`batch_sampler`, and asks loaders that keep a state for it.
        if name in ("loader", "place"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Say where the position is kept: as a count of micro-batches, by the strategy."""
        return {"position_kept_by": "lightning_sp"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing: the strategy has set `skip`."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the reading rank's batches on every rank of the group."""
        self.fillers_from = None
        reader = comm.rank_in(self.place.sequence_group) == 0
        source = iter(self.loader) if reader else iter(())
        # Of the epoch that a checkpoint ended in; the next ones are read from their start.
        skip, self.skip = self.skip, 0
        count, last = 0, None
        while True:
            message = self._read(source) if reader else None
            if self.place.sequence_group is not None:
                message = comm.broadcast_object(message, self.place.sequence_group)
            assert message is not None
            kind, value = message
            told = (self.place.dp_rank, kind, value if kind == "error" else None)
            states = comm.gather_objects(told, self.place.control_group)
            if errors := [f"rank {rank}: {said}" for rank, (_, state, said) in enumerate(states) if state == "error"]:
                raise SequenceParallelError("the loader failed: " + "; ".join(errors))
            if all(state == "end" for _, state, _ in states):
                return
            if unequal := {dp_rank for dp_rank, state, _ in states if state == "end"} & {
                dp_rank for dp_rank, state, _ in states if state == "batch"
            }:
                raise SequenceParallelError(
                    f"the ranks of one sequence (data-parallel rank {sorted(unequal)}) read loaders of different lengths: after {count} batches "
                    "some have ended and others have not; with shard_batch=False each must give its part of the same batches"
                )
            if kind == "end":
                if last is None:
                    raise SequenceParallelError(
                        f"data-parallel rank {self.place.dp_rank} has no batch at all while others have: split the dataset so that each has one"
                    )
                self.fillers_from = count if self.fillers_from is None else self.fillers_from
                value = ignore_targets(last)
            last = value
            count += 1
            if count > skip:
                yield value

    def _read(self, source: Iterator[Any]) -> tuple[str, Any]:
        try:
            batch = next(source)
            if self.place.sequence_group is not None and is_sharded(batch):
                return "error", (
                    f"{type(batch).__name__} holds one rank's part, and this loader is read by one rank of each sequence for all: let it give "
                    "whole batches, or set shard_batch=False, so that every rank reads its own"
                )
            return "batch", batch
        except StopIteration:
            return "end", None
        except Exception as error:  # sent to the peers, which would wait for ever
            return "error", f"{type(error).__name__}: {error}"
