"""The part of the strategy that knows in which view a step is carried: as a rank's part, and where that is refused, whole.

run() refused on every rank's part      ->      the global view      ->      run() again      ->      hooks of the batch, again
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Set
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_sp import comm
from lightning_sp.checkpoint import random_state, restore_random_state
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.batches.batches_to_try import BatchesToTry
from lightning_sp.preflight.evaluation.first_evaluation import FirstEvaluationBatches
from lightning_sp.preflight.refusals import explained, first_sentence, is_of_communication, is_of_numbers, with_lines
from lightning_sp.preflight.run import TrialFailedError
from lightning_sp.preflight.views import Views
from lightning_sp.step.batch_starts import BatchStarts
from lightning_sp.step.isolation.snapshot import snapshot
from lightning_sp.step.prepare import interceptions, shard_options
from lightning_sp.trainer import loops
from lightning_sp.trainer.hooks.batch_hooks import HandedBatch, of_user

_Found = TypeVar("_Found")


class CarriedSteps(BatchStarts, ABC):
    """What runs a step in the view that carries it; the strategy says how a batch is sharded and moved."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._interceptions = ExitStack()
        self._shard_options = ShardOptions()
        self._handed = HandedBatch()
        self._to_try = BatchesToTry()
        self._first_evaluations = FirstEvaluationBatches(self.config)
        self._views = Views()
        self._undo_hooks: Callable[[], None] | None = None
        self._is_handed = True  # whether hooks have had the batch in progress, and what they did stays
        self._inferred: dict[bool, dict[str, int]] = {}  # by the view
        self._whole_entries: Set[str] = frozenset()

    @abstractmethod
    def _sharded(self, batch: Any) -> Any:
        """Return this rank's part of a batch, on its device."""

    @abstractmethod
    def _moved(self, local: Any, info: SequenceInfo, *where: Any) -> Any:
        """Return a part as the step sees it, through Lightning's hooks of a batch."""

    def _show(self, *, whole: bool, anew: bool = False) -> None:
        """Let steps see whole sequences, or this rank's part, from here on; `anew` of batches of which nothing was inferred yet."""
        if anew:
            self._inferred.clear()
            self._whole_entries = frozenset()
        module, context = self._module, self._steps.context
        self._steps.end()
        self._interceptions.close()
        context.show(whole=whole)
        datamodule = getattr(module.trainer, "datamodule", None)
        known = shard_options(module, datamodule, self.config, self.root_device, global_view=whole)
        known = replace(known, whole_entries=self._whole_entries)
        is_split = self.sequence_parallel_size > 1
        self._shard_options = replace(known, inferred_dims=self._inferred.get(whole, {}), is_split=is_split)
        self._interceptions.enter_context(interceptions(context, module, self.config))

    def _carried(self, run: Callable[[], _Found], *, tried_after: bool = True) -> _Found:
        """Run what refuses a step that cannot be carried; refused, once more in the global view. Every rank must call it.

        Args:
            run: raises on all ranks together; it leaves no trace then.
            tried_after: whether the next training batch is to be tried in the new view; it is none that `run` has tried.

        Raises:
            SequenceParallelError: refused so, too: with both reasons.
        """
        kind = self._kind
        try:
            return run()
        except SequenceParallelError as error:
            if isinstance(error, TrialFailedError) or not getattr(error, "of_part", True):
                raise  # whole, too
            if before := self._views.refusal(kind):
                note = f"The step is in the global view, for its part of the sequence was refused: {first_sentence(before)}"
                raise with_lines(error, str(error), note) from error
            if not self._may_try or not comm.all_go_on(lost=is_of_communication(error)):
                raise
            refusal = error
        rank_zero_info(
            f"sequence_parallel: {kind or 'training'}_step is refused on each rank's part of the sequence: {first_sentence(str(refusal))}. "
            "It is tried in the global view, which shows the step whole sequences; global_view=False leaves it "
            f"{'on parts, with a warning' if is_of_numbers(refusal) else 'refused'}"
        )
        if self._undo_hooks is not None:  # before the view changes what it keeps at modules
            self._undo_hooks()
            self._undo_hooks, self._is_handed = None, False
        self._views.use_whole(kind, refusal)
        self._show(whole=True)
        try:
            found = run()
        except SequenceParallelError as error:
            self._views.give_up(kind)
            self._show(whole=False)
            if str(error) == str(refusal):
                raise
            refusal = explained(refusal, run)
            tried = f"The global view was tried (global_view='auto'), and refuses it, too: {error}"
            raise with_lines(refusal, str(refusal), tried) from error
        if tried_after:
            self._to_try.expect_again(self._next_step)
        return found

    def _carried_behind_hook(self, run: Callable[[], None]) -> None:
        # What the hooks have done stays, and the batch is split as they left it: they are not run again. It is tried before its step.
        undo, self._undo_hooks = self._undo_hooks, None
        before, trainer = self.sees_whole_sequences, self._module.trainer
        self._carried(run)
        if self.sees_whole_sequences == before:
            self._undo_hooks = undo
        elif self._to_try.last is not None:
            self._to_try.offer(self._to_try.last, training=trainer.training, step=trainer.global_step)

    @property
    def _next_step(self) -> int:
        """The optimizer step whose first batch can be tried next: gradients that accumulate are whole on each rank, and a trial would add."""
        trainer = self._module.trainer
        within = trainer.accumulate_grad_batches > 1 or not self._module.automatic_optimization
        return int(trainer.global_step) + within

    @property
    def _kind(self) -> str:
        return loops.evaluated_step(self._module.trainer)

    @property
    def _may_try(self) -> bool:
        """Whether the kind of step in progress may be tried in the global view."""
        split = self.sequence_parallel_size > 1
        return split and self.config.tries_global_view and self._views.may_try(self._kind)

    def _show_as_known(self) -> None:
        """Have the view of the kind of step whose batch comes next."""
        self._undo_hooks = None  # of the batch before
        whole = self._views.sees_whole(self._kind)
        if whole != self.sees_whole_sequences:
            self._show(whole=whole)

    def _before_hooks(self) -> None:
        """Remember what hooks of a batch may change, where the batch may be handed to them again."""
        due = self._to_try.is_offered or self._first_evaluations.is_due
        self._undo_hooks, self._is_handed = None, True
        if due and self._may_try:
            module = self._module
            streams, restore = random_state(), snapshot(module, of_user(module.trainer), hooks=False)

            def undo() -> None:
                hook_name = module._current_fx_name  # Lightning's, of the hook in progress
                restore()
                module._current_fx_name = hook_name
                restore_random_state(streams)

            self._undo_hooks = undo

    def _hand_again(self, whole: Any, handed: Any, hook: str | None, indices: tuple[int, ...]) -> None:
        """Give the step in progress its batch in the new view, after its hooks: as if they had not had the other one.

        Args:
            whole: as the loader gave it.
            handed: as the step would have seen it.
            hook: the name of those that have had it; None where what they did stays.
            indices: that they were given.
        """
        shown = self._moved(self._sharded(whole), self._info)
        self._handed.replace(handed, shown if hook is None else self._handed.after_hooks(self, hook, shown, indices))

    @property
    def _info(self) -> SequenceInfo:
        assert self._batch is not None
        return self._batch
