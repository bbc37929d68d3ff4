"""Hooks before a step, run as on one device: on whole batches, with numbers that the ranks of a sequence draw alike.

on_train_batch_start(self, batch, i): batch["labels"][:, :4] = -100        the sequence's first 4, on the rank that has them
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.batch_structure import entries_of
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.streams import mixed_seed, streams_from
from lightning_sp.data.batch.digest import digest
from lightning_sp.data.batch.filler_marks import ignore_beside_others, is_filler_batch, without_mark
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.data.batch.sharding import shard_batch
from lightning_sp.errors import SequenceParallelError
from lightning_sp.step.current_sequence import CurrentSequence
from lightning_sp.step.fillers import FillerHooks
from lightning_sp.step.results.batch_ends import whole_batch
from lightning_sp.step.resume.run_state import RunState
from lightning_sp.trainer.agreed_stop import AgreedStop
from lightning_sp.trainer.hooks.batch_end_hooks import WholeBatchEnds
from lightning_sp.trainer.hooks.batch_hooks import HandedBatch
from lightning_sp.trainer.hooks.batch_start_hooks import WholeBatchStarts
from lightning_sp.trainer.logged_numbers.epoch_weights import EpochWeights
from lightning_sp.trainer.logged_numbers.filler_logs import FillerLogs

_DIM = 1  # of a sequence that a hook adds, behind its rows


class BatchStarts(CurrentSequence, ABC):
    """The part of the strategy that runs users' hooks around a step."""

    root_device: torch.device
    _handed: HandedBatch
    _run: RunState

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._was_filler = False
        self._batch_starts = WholeBatchStarts(self._at_batch_start, self._before_transfer)
        self._batch_ends = WholeBatchEnds(self._whole_batch_end)
        follow = partial(self._follow_metrics, anew=True)
        self._of_fillers = FillerHooks(lambda: self._batch, lambda: self.root_device, follow)
        self._filler_logs = FillerLogs(lambda: self._batch)
        self._epoch_weights = EpochWeights(lambda: self._batch)
        self._stops = AgreedStop()

    def _follow_hooks(self, trainer: Any) -> None:
        """Run users' hooks around a batch as on one device, and stop with all ranks, until `_release_hooks`."""
        self._stops.follow(trainer, self.zigzag_mesh, self._groups.world)
        self._batch_starts.follow(trainer)
        self._batch_ends.follow(trainer)
        self._steps.context.hands_outputs = self._batch_ends.reads_outputs("training_step")
        self._epoch_weights.follow(trainer)
        if self.zigzag_mesh.data_parallel_size > 1:
            self._of_fillers.follow(trainer)
            self._filler_logs.follow(trainer)

    def _release_hooks(self) -> None:
        self._filler_logs.release()
        self._epoch_weights.release()
        self._of_fillers.release()
        self._batch_starts.release()
        self._batch_ends.release()
        self._stops.release()

    @abstractmethod
    def _follow_metrics(self, *, anew: bool = False) -> None:
        """Add up metrics over the ranks that have other rows or tokens in the batch in progress; `anew` where they were put back."""

    @abstractmethod
    def _options(self, batch: Any = None) -> ShardOptions:
        """Return what is known of the batch in progress."""

    def _draws_alike(self, info: SequenceInfo) -> AbstractContextManager[None]:
        """Let what the module makes of whole rows or sequences on their way be drawn alike; a trial draws by seeds of its own."""
        whole = self.sequence_parallel_size > 1 and (info.is_whole or self.sees_whole_sequences)
        alike = whole and not self._steps.context.is_tried
        return streams_from(mixed_seed(info.seed or 0, 1) if alike else None, self.root_device)

    def _before_transfer(self, own: Callable[[Any], Any], batch: Any, hook: str, number: int) -> Any:
        """Run a hook on the batch of a loader, before it is split. Every rank must call it."""
        # The hook may make another one, without the mark.
        self._was_filler, batch = is_filler_batch(batch), without_mark(batch)
        with suppress(SequenceParallelError):  # said on all ranks, where the batch is sharded
            ignore_beside_others(batch)
        if self.sequence_parallel_size == 1 or not self.config.shard_batch:
            return own(batch)
        trainer = self._module.trainer
        seed = self._run.streams.alike(f"{hook} {number} {trainer.state.stage}", trainer.global_step, self.zigzag_mesh)
        with streams_from(seed, self.root_device):
            return own(batch)

    def _at_batch_start(self, own: Callable[[Any], Any], handed: Any, hook: str, number: int) -> Any:
        """Run a hook that reads the batch of the step that comes on all of it, and split what it changes. Every rank must call it."""
        info, context = self._batch, self._steps.context
        if info is None or self.sequence_parallel_size == 1 or not self.config.shard_batch:
            return own(handed)
        # A trial draws by seeds of its own, to find out what is drawn.
        seed = None if context.is_tried else mixed_seed(info.seed or 0, 2, number)
        with streams_from(seed, self.root_device):
            if self.sees_whole_sequences or info.is_whole or context.reference is not None:
                return own(self._handed.instead_of(handed))
            shown = whole_batch(self._handed.instead_of(handed), info, self.unshard)
            noted = HandedBatch()
            noted.note(shown)
            found = own(shown)
        changes = [digest(shown) if noted.is_changed(shown) else None]
        if any(each != changes[0] for each in comm.gather_objects(changes[0], self._groups.sequence)):
            raise SequenceParallelError(
                f"{hook} leaves another batch on each of the {self.sequence_parallel_size} ranks of a sequence: they would compute parts of "
                "different sequences; change it on all of them alike, by a generator with one seed or torch's own, not by a rank or a clock"
            )
        if changes[0] is not None:
            split = partial(self._split_anew, hook, shown, handed, info)
            split() if context.is_tried else self._carried_behind_hook(split)
        return found

    @abstractmethod
    def _carried_behind_hook(self, run: Callable[[], None]) -> None:
        """Run what refuses a batch as a hook has left it; refused, once more in the global view. Every rank must call it."""

    def _split_anew(self, hook: str, shown: Any, handed: Any, info: SequenceInfo) -> None:
        """Give the step its part of a whole batch, as a hook has left it, in the place of the one that is handed on."""
        try:
            self._replace(shown, handed, info)
        except SequenceParallelError as error:
            fix = "use global_view=True, in which such a hook has the step's own batch"
            raise SequenceParallelError(f"{hook} leaves a batch that cannot be split: {error}; {fix}") from error

    def _replace(self, shown: Any, handed: Any, info: SequenceInfo) -> None:
        options, mesh = self._options(), self.zigzag_mesh
        options = replace(options, inferred_dims={**options.inferred_dims, **_added(shown, info)})
        local, found = shard_batch(shown, mesh.layout, mesh.sequence_rank, options)
        self._batch = replace(
            found.to(self.root_device), seed=info.seed, dropout=info.dropout, uneven_entries=info.uneven_entries, is_longer=info.is_longer,
            is_padded=info.is_padded, is_changed=info.is_changed, is_filler=info.is_filler, has_fillers=info.has_fillers,
            rows_of_groups=info.rows_of_groups,
        )  # fmt: skip
        if (step := self._steps.context.step) is not None:  # a trial, which runs the hooks within its step
            step.take(self._batch)
        self._handed.replace(handed, self._steps.shown(local, self._batch))


def _added(batch: Any, info: SequenceInfo) -> dict[str, int]:
    """Return the entries that hooks have added to a batch, and that have its rows and tokens, with the dim of these."""
    entries = {name: value for name, value in (entries_of(batch) or {}).items() if isinstance(value, Tensor)}
    shapes = {(entries[name].shape[0], entries[name].shape[dim]) for name, dim in info.dims.items() if name in entries}
    carries = {name for name, value in entries.items() if value.shape[: _DIM + 1] in shapes}
    return {name: info.dims.get(name, _DIM) for name in carries if name in info.dims or name not in info.names}
