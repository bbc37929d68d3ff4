"""The part of the strategy that tries a step before it runs: of training, and of an evaluation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_sp import comm
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.batches.earlier_step import say_what_was_not_shown, shown_again, step_in_progress
from lightning_sp.preflight.carried_steps import CarriedSteps
from lightning_sp.preflight.evaluation.first_evaluation import FirstOfLoader
from lightning_sp.preflight.evaluation.judgement import NotComparedError
from lightning_sp.preflight.evaluation.output_kinds import returned_and_kept
from lightning_sp.preflight.first_batch import TriedBatch, shapes_inferred, try_first_batch
from lightning_sp.preflight.recording.numbers_read.followed_batches import follow
from lightning_sp.preflight.recording.unheard import prints_held
from lightning_sp.preflight.refusals import first_sentence
from lightning_sp.preflight.training_numbers import NumbersDifferError
from lightning_sp.step.evaluation import EvaluationProgress
from lightning_sp.step.results.kept_values import KeptValues
from lightning_sp.step.users_numbers.counters import Counter, reads_batch_index
from lightning_sp.step.users_numbers.schedules import Schedules
from lightning_sp.trainer import loops
from lightning_sp.trainer.hooks.batch_hooks import acts_at_batch_start
from lightning_sp.trainer.logged_numbers.watched_numbers import WatchedNumbers
from lightning_sp.trainer.optimizers.manual_optimization import tried_training_step


class TriedSteps(CarriedSteps, ABC):
    """What a run learns by trying; the strategy says when."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._evaluated = EvaluationProgress()
        self._watched = WatchedNumbers()
        self._begins = True  # whether the batch in progress begins an optimizer step

    # ---- training

    def _offer(self, batch: Any) -> None:
        """Have a batch of training tried, as its loader gave it, if that is due."""
        trainer = self._module.trainer
        self._begins = loops.of_batch(trainer)["begins"] and self._module.automatic_optimization
        self._offer_changed(batch, self._info.is_changed and trainer.training)

    def _offer_changed(self, batch: Any, is_changed: bool) -> None:
        trainer = self._module.trainer
        if is_changed:
            step = trainer.global_step if self._begins else self._next_step
            self._to_try.expect_changed(step, self._info.longest, batch)
            self._to_try.cut_is_untried |= self._to_try.is_cut_elsewhere(self._info)
        self._to_try.offer(batch, training=trainer.training, step=trainer.global_step, padded=self._pads_step)

    def _offer_after_hooks(self, handed: Any, schedules: Schedules) -> bool:
        """Have the batch in progress tried where hooks of its start have set a phase. Every rank must call it.

        Args:
            handed: the batch as the step would see it.
            schedules: what knows of phases.

        Returns:
            Whether it is tried so.
        """
        to_try, trainer = self._to_try, self._module.trainer
        if to_try.last is None or to_try.is_offered or not acts_at_batch_start(trainer):
            return False
        own = torch.tensor(
            [schedules.have_changed_in_hooks(trainer), self._handed.is_changed(handed)], dtype=torch.int64
        )
        is_set, is_changed = map(bool, comm.largest(own, self._groups.world).tolist())
        if is_set and is_changed:  # what hooks did to the batch cannot be undone by now: the next one is tried
            to_try.expect_changed(self._next_step, self._info.longest, to_try.last)
        elif is_set:
            self._offer_changed(to_try.last, True)
            self._undo_hooks = lambda: None
        return to_try.is_offered

    @property
    def _pads_step(self) -> bool:
        """Whether the next batch is padded, and is all of an optimizer step: a trial would add to gradients that accumulate."""
        alone = self._module.trainer.accumulate_grad_batches == 1 and self._module.automatic_optimization
        return self._info.is_padded and alone

    @property
    def _infers(self) -> bool:
        """Whether entries of the first batch may be split by their shapes: the preflight tries that."""
        assert self._mesh is not None
        return self._mesh.layout.size > 1 and bool(self.config.shard_batch)

    def _options(self, batch: Any = None) -> ShardOptions:
        """Return what is known of the batch that the Trainer hands over next; of one that is given, names too. Every rank must call it."""
        if batch is not None:
            self._know_names(batch)
        trainer = self._module.trainer
        tried = self._to_try.is_due(training=trainer.training or trainer.sanity_checking)
        patterns = self._steps.context.last_attention_patterns
        return replace(self._shard_options, attention=patterns, infer_sequences=tried and self._infers)

    def _know_names(self, batch: Any) -> None:
        """Infer the sequences of an evaluation's first batch in the global view, where no training step has shown them.

        That is exact there whatever they are: an entry that is none shows its whole, too. A step that sees its rank's part would lose tokens.
        """
        whole = self.sees_whole_sequences
        if not (whole and self._kind and self._infers) or whole in self._inferred:
            return
        found = comm.gather_objects(shapes_inferred(batch, self._shard_options), self._groups.world)
        # Groups whose batches have other entries agree on what all have.
        common = {name: dim for name, dim in found[0].items() if all(each.get(name) == dim for each in found)}
        self._inferred[whole] = common
        self._shard_options = replace(self._shard_options, inferred_dims=common)

    def _preflight(self, handed: Any, batch_idx: int, schedules: Schedules) -> None:
        """Try the batch of a training step if that is due.

        Args:
            handed: as the step would see it.
            batch_idx: its number.
            schedules: what knows of phases that hooks set.
        """
        phase_is_set = self._offer_after_hooks(handed, schedules)
        whole, after = self._to_try.take(self._module.trainer.global_step)
        if whole is None:
            return
        differed = self._error_of_last_loss()
        hook, before = "on_train_batch_start", self.sees_whole_sequences
        known = self._trial_options() | {
            "seen_tokens": self._to_try.seen_tokens,
            "cut_is_untried": self._to_try.cut_is_untried and not before,
        }
        batch, then = self._to_try.tried(whole)

        def tried() -> TriedBatch:
            first = not after or self.sees_whole_sequences != before
            options = replace(self._shard_options, infer_sequences=self._infers and first)
            step = self._handed.tried(tried_training_step, hook, handed, batch_idx)
            index = SimpleNamespace(batch_idx=batch_idx if then is None else then.batch_idx)

            def of_index(strategy: Any, shown: Any) -> Any:
                return step(strategy, shown, *loops.batch_index(self._module, index.batch_idx))

            with self._tried(of_index) as run, shown_again(self._module, then, schedules):
                trial = partial(try_first_batch, batch, self._steps, run, config=self.config, options=options)
                told = {**known, "with_numbers": then is not None}
                if first and reads_batch_index(self._module):
                    most = self._module.trainer.num_training_batches - 1
                    last = int(most) if math.isfinite(most) else None
                    counters = *told["of_hooks"].counters, Counter(index, "batch_idx", 1, last)
                    told["of_hooks"] = told["of_hooks"]._replace(counters=counters)
                return trial(after=after, may_retry=self._may_try, **told)

        try:
            found = self._carried(tried, tried_after=False)
        except NumbersDifferError:  # in both views, or the global view refuses the step: a warning is left
            found = tried()
        if differed is not None and self.sees_whole_sequences == before:
            raise differed  # by a trial of the next batch it is not explained
        say_what_was_not_shown(then, are_shown=self._steps.operations_are_shown or self.sees_whole_sequences)
        self._to_try.note_length(self._info.longest, found.seen_tokens)
        self._to_try.note_cut(self._info, alike=found.cuts_alike or self.sees_whole_sequences)
        if not found.has_targets:
            within = self._next_step > self._module.trainer.global_step
            self._to_try.expect_next(self._next_step, after, within=within)
        if not after or self.sees_whole_sequences != before:
            self._inferred[self.sees_whole_sequences] = found.inferred
            self._shard_options = replace(self._shard_options, inferred_dims=found.inferred)
        self._whole_entries = found.whole
        self._shard_options = replace(self._shard_options, whole_entries=found.whole)
        if self.sees_whole_sequences and not before:
            self._warn_of_steps_before(after, differed)
        if not self._is_handed:
            self._hand_again(whole, handed, None if phase_is_set else hook, (batch_idx,))

    def _error_of_last_loss(self) -> SequenceParallelError | None:
        """Return the error of the step before if its losses differed between ranks: a trial begins without. Every rank must call it."""
        try:
            self._steps.judge_last_loss()
        except SequenceParallelError as error:
            return error
        return None

    def _warn_of_steps_before(self, after: int, differed: SequenceParallelError | None) -> None:
        """Say where a step enters the global view that steps before it ran on parts, with what was not tried then."""
        again = "begin again with global_view=True, or from a checkpoint of before"
        if differed is not None and not self._to_try.trained_untried:
            rank_zero_warn(
                f"training_step is in the global view from optimizer step {self._module.trainer.global_step} on. The one before ran on each "
                f"rank's part of the sequence, and was not one device's: {first_sentence(str(differed))}. To leave it out, {again}"
            )
        elif after and self._views.part_ends(self._kind):
            rank_zero_info(
                f"training_step is in the global view from optimizer step {after} on, for a rank's part of the sequence ends it there with an "
                "error: steps before that did so, too, would have ended"
            )
        elif after and self._views.is_for_numbers(self._kind):
            rank_zero_warn(
                f"training_step is in the global view from optimizer step {after} on, for what it logs. Numbers that it logged before may be of "
                "a rank's part of the sequence; weights are one device's"
            )
        elif after:
            rank_zero_warn(
                f"training_step is in the global view from optimizer step {after} on, for it does there what its trials before did not. If "
                f"steps before did so, too, they ran on each rank's part of the sequence, and were not one device's: {again}"
            )
        elif self._to_try.trained_untried:
            rank_zero_warn(
                f"training_step is in the global view from optimizer step {self._module.trainer.global_step} on. The first micro-batch of the "
                "one before had no targets, so that nothing was compared; its others ran on each rank's part of the sequence, and were not one "
                f"device's: {again}"
            )

    def _follow_operations(self) -> None:
        """Have the batch in progress tried before the next step where its loss is made of new operations. Every rank must call it."""
        if not self.sees_whole_sequences and self._steps.has_new_operations:
            trainer = self._module.trainer
            self._to_try.expect_comparison(trainer.global_step + 1, step_in_progress(trainer))

    def _say_what_was_not_compared(self) -> None:
        """Warn where a fit ends with a step of new operations, which no step has followed in which they would be compared."""
        self._watched.finish()
        if self._to_try.lacks_comparison:
            rank_zero_warn(
                f"training_step's loss at the last of {self._module.trainer.global_step} optimizer steps is made of operations that none before "
                "was: whether it is one device's was not compared; one more step would show it"
            )

    @contextmanager
    def _tried(self, step: Callable[..., Any], *others: Any) -> Iterator[Callable[[Any, SequenceInfo], Any]]:
        """Give what runs a step of Lightning's strategy on a batch of the host without a log, and have the batch in progress back."""
        before = self._batch

        try:
            with loops.without_loggers(self._module.trainer), prints_held() as begin:

                def run(batch: Any, info: SequenceInfo) -> Any:
                    begin()
                    self._batch = info
                    follow(batch)
                    return step(self, self._moved(batch, info), *others)

                yield run
        finally:
            self._batch = before

    # ---- evaluation

    def _compare_evaluation(self, step: Callable[..., Any], handed: Any, *others: Any) -> None:
        """Compare the first batch of an evaluation's loader.

        Args:
            step: of Lightning's strategy.
            handed: the batch as the step would see it.
            others: what else the step is given.
        """
        if not self._first_evaluations.is_due:
            return
        first = self._first_evaluations.take()
        hook, indices = self._evaluated.batch_start_hook(self._module.trainer)
        compare = partial(self._compare_step, first, step, handed, *others, may_retry=self._may_try)
        try:
            self._carried(compare)
        except NotComparedError as error:
            (rank_zero_warn if error.of_numbers else rank_zero_info)(str(error))
        if not self._is_handed:
            self._hand_again(first.batch, handed, hook, indices)

    def _compare_new_kinds(
        self, output: Any, kept: KeptValues | None, step: Callable[..., Any], handed: Any, *others: Any
    ) -> None:
        """Compare an evaluation's batch that has shown outputs of another kind than those compared before. Every rank must call it.

        Args:
            output: what the step has returned.
            kept: what it keeps for later, if those values are made whole.
            step: of Lightning's strategy.
            handed: the batch as the step has seen it.
            others: what else the step was given.

        Raises:
            SequenceParallelError: an output is not one device's. The step has run on parts: the global view comes too late for it.
        """
        current, name = self._first_evaluations.current, step.__name__
        kinds, counts = self._first_evaluations.output_kinds, self._outputs_count(name)
        if self.sees_whole_sequences or current is None or not (counts or kept) or not kinds.may_have_new(name):
            return
        are_new = kinds.are_new(name, returned_and_kept(output if counts else None, kept))
        if not any(comm.gather_objects(are_new, self._groups.world)) or not kinds.compare_again(name):
            return
        try:
            self._compare_step(current, step, handed, *others, may_retry=False)
        except NotComparedError as error:
            (rank_zero_warn if error.of_numbers else rank_zero_info)(str(error))

    def _compare_step(
        self, batch: FirstOfLoader, step: Callable[..., Any], handed: Any, *others: Any, may_retry: bool
    ) -> None:
        trainer, name = self._module.trainer, step.__name__
        hook, indices = self._evaluated.batch_start_hook(trainer)
        with self._tried(self._handed.tried(step, hook, handed, *indices), *others) as run:
            self._first_evaluations.compare(
                batch, self._steps, run, name=name, options=self._options(), may_retry=may_retry,
                whole_output=self._whole_output, predicts=self._outputs_count(name), **self._trial_options(),
            )  # fmt: skip

    def _outputs_count(self, name: str) -> bool:
        """Return whether what an evaluation step returns is read by others."""
        return bool(self._module.trainer.predicting or self._batch_ends.reads_outputs(name))

    @abstractmethod
    def _trial_options(self) -> dict[str, Any]:
        """Return what a trial is told of the run."""
