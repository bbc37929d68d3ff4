"""The part of the strategy that tries a step before it runs: as it is, and where it is refused so, in the global view."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_sp import comm
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.evaluation import FirstEvaluationBatches, NotComparedError
from lightning_sp.preflight.first_batch import FirstBatch, try_first_batch
from lightning_sp.preflight.run import TrialFailedError
from lightning_sp.step.current_sequence import CurrentSequence
from lightning_sp.step.evaluation import EvaluationProgress
from lightning_sp.step.prepare import interceptions, shard_options
from lightning_sp.trainer import loops
from lightning_sp.trainer.batch_hooks import HandedBatch
from lightning_sp.trainer.optimizers.manual_optimization import tried_training_step

_Found = TypeVar("_Found")


class TriedSteps(CurrentSequence):
    """What a run learns by trying; the strategy says when, and how a batch is sharded and moved."""

    root_device: torch.device

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._interceptions = ExitStack()
        self._shard_options = ShardOptions()
        self._handed = HandedBatch()
        self._first_batch = FirstBatch()
        self._first_evaluations = FirstEvaluationBatches(self.config)
        self._evaluated = EvaluationProgress()
        self._refusal = ""  # of the step as it is, in a run that goes on in the global view

    # ---- what the strategy does with a batch

    def _sharded(self, batch: Any) -> Any:
        """Return this rank's part of a batch, on its device."""
        raise NotImplementedError

    def _moved(self, local: Any, info: SequenceInfo, *where: Any) -> Any:
        """Return a part as the step sees it, through Lightning's hooks of a batch."""
        raise NotImplementedError

    # ---- the view

    def _show(self, *, whole: bool) -> None:
        """Let steps see whole sequences, or this rank's part, from here on."""
        module, context = self._module, self._steps.context
        self._steps.end()
        self._interceptions.close()
        context.show(whole=whole)
        datamodule = getattr(module.trainer, "datamodule", None)
        self._shard_options = shard_options(module, datamodule, self.config, self.root_device, global_view=whole)
        self._interceptions.enter_context(interceptions(context, module, self.config))

    def _carried(self, run: Callable[[], _Found], *, tried_after: bool = True) -> _Found:
        """Run what refuses a step that cannot be carried; refused, once more in the global view. Every rank must call it.

        Args:
            run: raises on all ranks together; it leaves no trace then.
            tried_after: whether the next training batch is to be tried in the new view; it is none that `run` has tried.

        Raises:
            SequenceParallelError: refused so, too: with both reasons.
        """
        try:
            return run()
        except SequenceParallelError as error:
            if isinstance(error, TrialFailedError) or not getattr(error, "of_part", True):
                raise  # whole, too
            if self._refusal:
                raise _both(self._refusal, error) from error
            if not self._tries_global_view or _left_others_waiting(error):
                raise
            refusal = error
        rank_zero_info(
            f"sequence_parallel: refused on each rank's part of the sequence: {_first_sentence(str(refusal))}. It is tried in the global view, "
            "which shows the step whole sequences; global_view=False leaves it refused"
        )
        self._refusal = str(refusal)
        self._show(whole=True)
        try:
            found = run()
        except SequenceParallelError as error:
            self._refusal = ""
            self._show(whole=False)
            raise _both(str(refusal), error) from error
        if tried_after:
            # Gradients that accumulate are whole on each rank: a trial would add to them.
            trainer = self._module.trainer
            within = trainer.accumulate_grad_batches > 1 or not self._module.automatic_optimization
            self._first_batch.expect_again(trainer.global_step + within)
        return found

    @property
    def _tries_global_view(self) -> bool:
        return self.config.tries_global_view and self.sequence_parallel_size > 1 and not self.sees_whole_sequences

    def _hand_again(self, whole: Any, handed: Any, hook: str, indices: tuple[int, ...]) -> None:
        """Give the step in progress its batch in the new view, changed by hooks that have changed it.

        Args:
            whole: as the loader gave it.
            handed: as the step would have seen it.
            hook: the name of those that have had it.
            indices: that they were given.
        """
        shown = self._moved(self._sharded(whole), self._info)
        shown = self._handed.tried(_as_it_is, hook, handed, *indices)(self, shown)
        self._handed.replace(handed, shown)

    @property
    def _info(self) -> SequenceInfo:
        assert self._batch is not None
        return self._batch

    # ---- training

    @property
    def _infers(self) -> bool:
        """Whether entries of the first batch may be split by their shapes: the preflight tries that."""
        assert self._mesh is not None
        return self._mesh.layout.size > 1 and bool(self.config.shard_batch)

    def _options(self) -> ShardOptions:
        """Return what is known of the batch that the Trainer hands over next."""
        trainer = self._module.trainer
        tried = self._first_batch.is_due(training=trainer.training or trainer.sanity_checking)
        patterns = self._steps.context.last_attention_patterns
        return replace(self._shard_options, attention=patterns, infer_sequences=tried and self._infers)

    def _preflight(self, handed: Any, batch_idx: int) -> None:
        """Try the batch of a training step if that is due.

        Args:
            handed: as the step would see it.
            batch_idx: its number.
        """
        whole, after = self._first_batch.take(self._module.trainer.global_step)
        if whole is None:
            return
        hook, before = "on_train_batch_start", self.sees_whole_sequences

        def tried() -> dict[str, int]:
            first = not after or self.sees_whole_sequences != before
            options = replace(self._shard_options, infer_sequences=self._infers and first)
            step = self._handed.tried(tried_training_step, hook, handed, batch_idx)
            with self._tried(step, *loops.batch_index(self._module, batch_idx)) as run:
                trial = partial(try_first_batch, whole, self._steps, run, config=self.config, options=options)
                return trial(after=after, **self._trial_options())

        inferred = self._carried(tried, tried_after=False)
        if not after or self.sees_whole_sequences != before:
            self._shard_options = replace(self._shard_options, inferred_dims=inferred)
        if self.sees_whole_sequences != before:
            self._hand_again(whole, handed, hook, (batch_idx,))

    @contextmanager
    def _tried(self, step: Callable[..., Any], *others: Any) -> Iterator[Callable[[Any, SequenceInfo], Any]]:
        """Give what runs a step of Lightning's strategy on a batch of the host without a log, and have the batch in progress back."""
        before = self._batch

        def run(batch: Any, info: SequenceInfo) -> Any:
            self._batch = info
            return step(self, self._moved(batch, info), *others)

        try:
            with loops.without_loggers(self._module.trainer):
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
        first, trainer, before = self._first_evaluations.take(), self._module.trainer, self.sees_whole_sequences
        hook, indices = self._evaluated.batch_start_hook(trainer)

        def compare() -> None:
            with self._tried(self._handed.tried(step, hook, handed, *indices), *others) as run:
                self._first_evaluations.compare(
                    first, self._steps, run, name=step.__name__, options=self._options(),
                    whole_output=self._whole_output if trainer.predicting else None, **self._trial_options(),
                )  # fmt: skip

        try:
            self._carried(compare)
        except NotComparedError as error:
            rank_zero_info(str(error))
        if self.sees_whole_sequences != before:
            self._hand_again(first.batch, handed, hook, indices)

    def _trial_options(self) -> dict[str, Any]:
        """Return what a trial is told of the run."""
        raise NotImplementedError

    def _whole_output(self, output: Any) -> Any:
        """Return a prediction with whole sequences. Every rank must call it."""
        raise NotImplementedError


def _as_it_is(_: Any, batch: Any, *__: Any) -> Any:
    return batch


def _both(refusal: str, error: SequenceParallelError) -> SequenceParallelError:
    """Return one refusal of a step that is refused in both views."""
    if str(error) == refusal:
        return error
    kind = NotComparedError if isinstance(error, NotComparedError) else SequenceParallelError
    return kind(f"{refusal}\nThe global view was tried (global_view='auto'), and refuses it, too: {error}")


def _left_others_waiting(error: BaseException) -> bool:
    """Return whether a rank was refused in a collective that another had left: their messages do not belong together any more.

    Communicates: as `comm.tell_failure`.
    """
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    lost = any(map(comm.is_of_communication, chain))
    return comm.tell_failure("a rank waits for another" if lost else None, named=False) is not None


def _first_sentence(words: str) -> str:
    """Return what a refusal says before its advice."""
    return words.splitlines()[0].partition("; ")[0]
