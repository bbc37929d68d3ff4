"""A loader that one rank of a sequence's group reads and sends to its peers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

from lightning_sp import comm
from lightning_sp.data.batch.digest import digest
from lightning_sp.data.batch.filler_marks import marked
from lightning_sp.data.batch.sharded_batch import is_sharded
from lightning_sp.data.loaders.coordinates import DataCoordinates
from lightning_sp.data.loaders.deal import DealtIndices, RandomStream, random_states
from lightning_sp.data.loaders.own_state import KEPT_BY_CURSOR, OwnState
from lightning_sp.data.loaders.workers import named_workers, prepare_workers
from lightning_sp.errors import SequenceParallelError, told_error


class ReadResult(NamedTuple):
    """What reading a loader gave.

    Args:
        kind: "batch", "end" or "error".
        value: the batch, None, or what failed.
    """

    kind: str
    value: Any


class RankState(NamedTuple):
    """What one rank has read, in the exchange with all ranks.

    Args:
        dp_rank: its data-parallel rank.
        kind: of its `ReadResult`.
        error: what failed; else None.
        round: a number of the batches of all groups, of which this rank's is one; None where they are not known here.
    """

    dp_rank: int
    kind: str
    error: str | None
    round: int | None = None


class BroadcastLoader:
    """One rank of a sequence's group reads a loader and sends each batch to its peers, its end and its errors included.

    Without a sequence's group in its coordinates every rank reads its own: batches that were sharded by hand, or split by the user's sampler.

    Data-parallel groups whose loaders end at different times go on together: those that have ended repeat their last batch, in training with
    the mark of fillers, until all have.

    Args:
        loader: the user's; iterated on the reading rank alone.
        coordinates: this rank's.
        dealt: the loader's sampler, where its indices are dealt over the data-parallel groups.
        step_batches: in training the batches of an optimizer step, for loaders that keep a state of their own.
        trains: the batches are trained on.

    `deals` says whether the batches are dealt over the groups, each of which reads all of them (`find_deals`).
    `skip` micro-batches of the next epoch are read and discarded: the cursor that a checkpoint stored. After `resume` none are.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        coordinates: DataCoordinates,
        dealt: DealtIndices | None = None,
        step_batches: int | None = None,
        *,
        trains: bool = True,
    ) -> None:
        self.loader, self.coordinates, self.dealt, self.trains = loader, coordinates, dealt, trains
        self.deals = False
        self._source: Iterator[Any] | None = None
        self._first: ReadResult | None = None
        self.fillers_from: int | None = None
        self.skip = 0
        own = OwnState(loader, step_batches) if step_batches and dealt is None else None
        self._own_state = own if own is not None and own.is_kept else None
        self._resumed: tuple[Any, int] | None = None

    def __len__(self) -> int:
        """Return the length of the user's loader; where its batches are dealt, the number of rounds."""
        return -(-len(self.loader) // (self.coordinates.dp_size if self.deals else 1))  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # Lightning turns epochs by `sampler`/`batch_sampler`, and asks loaders that keep a state for it.
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Say that the strategy stores the cursor, as a count of micro-batches."""
        return KEPT_BY_CURSOR

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the strategy has set `skip`, or called `resume`."""

    def own_states(self, count: int, *, finished: bool) -> list[Any] | None:
        """Return each data-parallel group's own state of its loader; None where a group has none.

        Args:
            count: batches of the epoch that were trained.
            finished: nothing of the epoch is left.

        Communicates: a gather of the states over all ranks, where loaders keep one.
        """
        if self._own_state is None:
            return None
        reads = comm.rank_in(self.coordinates.sequence_group) == 0
        own = (self.coordinates.dp_rank, self._own_state.stored(count, finished=finished)) if reads else None
        states = [each for each in comm.gather_objects(own, self.coordinates.control_group) if each is not None]
        of_group = dict(states)
        if len(states) != self.coordinates.dp_size or len(of_group) != len(states) or None in of_group.values():
            return None
        return [of_group[dp_rank] for dp_rank in range(self.coordinates.dp_size)]

    def resume(self, states: list[Any] | None, count: int) -> bool:
        """Let the next epoch go on from the groups' own states after `count` batches; return whether that is possible here."""
        if self._own_state is None or states is None or len(states) != self.coordinates.dp_size:
            return False
        self._resumed = states[self.coordinates.dp_rank], count
        return True

    def __iter__(self) -> Iterator[Any]:
        """Yield the reading rank's batches on every rank of the group."""
        self.fillers_from = None
        reads = comm.rank_in(self.coordinates.sequence_group) == 0
        resumed, self._resumed = self._resumed, None
        # Of the epoch that a checkpoint ended in; the next ones are read from their start.
        skip, self.skip = self.skip, 0
        count, last = (0, None) if resumed is None else (resumed[1], None)
        source = self._begin_epoch(resumed) if reads else iter(())
        while True:
            kind, batch = self._receive(self._read_own(source) if reads else None)
            error = batch if kind == "error" else None
            drawn = self.dealt.rounds.popleft() if self.dealt is not None and reads and kind == "batch" else None
            ended = self._ended(RankState(self.coordinates.dp_rank, kind, error, drawn), count)
            if len(ended) == self.coordinates.dp_size:
                return
            if ended and not count:
                last = self._of_others(batch if kind == "batch" else None)
            if ended and self.trains and (shown := batch if kind == "batch" else last) is not None:
                marked(shown)  # refused on all ranks
            if kind == "end":
                if last is None:
                    raise SequenceParallelError(
                        f"data-parallel rank {self.coordinates.dp_rank} had read all of its {count} batches when the checkpoint was stored, and "
                        "others have more: what it is to repeat beside them is not in its loader's state; resume from an earlier checkpoint or "
                        "one of an epoch's end, or split the dataset evenly"
                    )
                self.fillers_from = count if self.fillers_from is None else self.fillers_from
                batch = marked(last) if self.trains else last  # of an evaluation nothing stays
            last = batch
            count += 1
            if self._own_state is not None and kind == "batch" and reads:
                self._own_state.note(count)
            if count > skip:
                yield batch

    def _begin_epoch(self, resumed: tuple[Any, int] | None) -> Iterator[Any]:
        """Return what the reading rank reads an epoch from."""
        # Of the first epoch `find_deals` has read the start.
        started, self._source, self._first = self._source, None, None
        if resumed is not None and self._own_state is not None:
            return self._own_state.restored(*resumed)
        if self._own_state is not None:
            self._own_state.begin_epoch()
        return started or self._begun()

    def _begun(self) -> Iterator[Any]:
        prepare_workers(self.loader)
        return iter(self.loader)

    def _read(self, source: Iterator[Any]) -> ReadResult:
        try:
            with named_workers():
                batch = next(source)
            if self.coordinates.sequence_group is not None and is_sharded(batch):
                return ReadResult(
                    "error",
                    f"{type(batch).__name__} holds one rank's part, and this loader is read by one rank of each sequence for all: let it give "
                    "whole batches, or set shard_batch=False, so that every rank reads its own",
                )
            return ReadResult("batch", batch)
        except StopIteration:
            return ReadResult("end", None)
        except Exception as error:  # sent to the peers, which would wait for ever
            return ReadResult("error", told_error(error))

    def find_deals(self) -> None:
        """Read the first batch on each data-parallel group: where it is the same on all, nobody has split the data, and batches are dealt.

        Collective over all ranks.

        Raises:
            SequenceParallelError: a rank's loader failed.
        """
        coordinates = self.coordinates
        first = self._read_first() if comm.rank_in(coordinates.sequence_group) == 0 else None
        error = first.value if first is not None and first.kind == "error" else None
        states = comm.gather_objects((_number(first), error), coordinates.control_group)
        check_errors([error for _, error in states])
        self.deals = len({number for number, _ in states if number is not None}) == 1

    def peers_read_others(self) -> bool:
        """Return whether a rank would read another first batch than the one that reads for its sequence: then that part of the data is lost.

        Peers read theirs with the reading rank's random numbers, and drop it. Collective over all ranks.
        """
        group = self.coordinates.sequence_group
        reads = comm.rank_in(group) == 0
        states = comm.broadcast_object(random_states() if reads else None, group)
        if reads:
            first = self._read_first()
        else:
            with RandomStream(states):
                first = self._read(self._begun())
            if getattr(self.loader, "_iterator", None) is not None:
                self.loader._iterator = None  # type: ignore[attr-defined]  # workers that persist
        numbers = comm.gather_objects((self.coordinates.dp_rank, _number(first)), self.coordinates.control_group)
        return len(set(numbers)) > self.coordinates.dp_size

    def _read_first(self) -> ReadResult:
        """Read the first batch, which the first epoch begins with, once."""
        if self._first is None:
            # Of a loader that keeps a state it is read in a resume too, where the run before drew nothing.
            with nullcontext() if self._own_state is None else RandomStream(random_states()):
                source = self._begun()
                self._first = self._read(source)
            if self._first.kind == "batch":
                self._source = itertools.chain([self._first.value], source)
        return self._first

    def _read_own(self, source: Iterator[Any]) -> ReadResult:
        """Return this group's batch of a round where batches are dealt, else the next one."""
        if not self.deals:
            return self._read(source)
        own = None
        for place in range(self.coordinates.dp_size):
            found = self._read(source)
            if own is None and (found.kind != "batch" or place == self.coordinates.dp_rank):
                own = found
            if found.kind != "batch":
                break
        assert own is not None
        return own

    def _receive(self, read: ReadResult | None) -> ReadResult:
        """Return what the reading rank of this sequence has read; it passes that in, its peers None."""
        if self.coordinates.sequence_group is not None:
            sent = None if read is None else tuple(read)
            read = ReadResult(*comm.broadcast_object(sent, self.coordinates.sequence_group))
        assert read is not None
        return read

    def _of_others(self, own: Any) -> Any:
        """Return a batch of an epoch whose groups are more than its batches: those that have none repeat another's.

        Communicates: the batches that there are, over all ranks.
        """
        return next(each for each in comm.gather_objects(own, self.coordinates.control_group) if each is not None)

    def _ended(self, own: RankState, count: int) -> set[int]:
        """Return the data-parallel ranks whose loaders have ended, after `count` batches; the same on all ranks.

        Raises:
            SequenceParallelError: a rank's loader failed, or ranks of one sequence read different numbers of batches.
        """
        states = [RankState(*state) for state in comm.gather_objects(tuple(own), self.coordinates.control_group)]
        check_errors([state.error for state in states])
        if len({state.round for state in states} - {None}) > 1:
            raise SequenceParallelError(
                f"the sampler of {type(self.loader).__name__} draws other indices on each data-parallel rank (in round {count}), so its batches "
                "cannot be dealt over them: give it a generator with the same seed on all ranks, or split the samples yourself with "
                "Trainer(use_distributed_sampler=False)"
            )
        ended = {state.dp_rank for state in states if state.kind == "end"}
        if unequal := ended & {state.dp_rank for state in states if state.kind == "batch"}:
            raise SequenceParallelError(
                f"the ranks of one sequence (data-parallel rank {sorted(unequal)}) read loaders of different lengths: after {count} batches "
                "some have ended and others have not; each must read the same batches (use_distributed_sampler=False), or its part of the same "
                "(shard_batch=False)"
            )
        return ended


def _number(read: ReadResult | None) -> int | None:
    return digest(read.value) if read is not None and read.kind == "batch" else None


def check_errors(errors: list[str | None]) -> None:
    """Raise what the loaders of some ranks failed with.

    Args:
        errors: of every rank; None where it did not fail.
    """
    if said := [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]:
        raise SequenceParallelError("the loader failed: " + "; ".join(said))
