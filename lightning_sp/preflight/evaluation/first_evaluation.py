"""The first batch of an evaluation: a crop of it through the user's own step, whole and sharded, and what it shows compared.

Of validation and test the numbers, of a prediction what the step returns. Autocast is switched off meanwhile.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sp import comm
from lightning_sp.config import StrategyConfig
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.errors import SequenceParallelError, told_error
from lightning_sp.preflight.crops.crop import Crop, whole_extent
from lightning_sp.preflight.crops.shared_crop import LONGER_TOKENS, crops_of
from lightning_sp.preflight.crops.shorter import RunStep
from lightning_sp.preflight.evaluation.evaluation_runs import (
    NOTHING_TURNED,
    PartRun,
    WholeOutput,
    WholeRun,
    decision_of_part,
    find_others,
    run_part,
    run_whole,
)
from lightning_sp.preflight.evaluation.judgement import (
    NotComparedError,
    TriedEvaluation,
    judge,
    judge_later_batches,
)
from lightning_sp.preflight.evaluation.output_kinds import OutputKinds
from lightning_sp.preflight.evaluation.shown_outcomes import judge_other_outcomes
from lightning_sp.preflight.indices.padding import PaddingReadError, check_padding_read
from lightning_sp.preflight.indices.part_indices import PartIndexError, check_part_indices
from lightning_sp.preflight.recording.checked_indices import CheckedIndices
from lightning_sp.preflight.recording.hidden_terms import Call
from lightning_sp.preflight.recording.token_outcomes import Other
from lightning_sp.step.results.output_structure import Kinds
from lightning_sp.step.runner import StepRunner
from lightning_sp.step.users_numbers.schedules import MOST_TASKS, structure_of, tasks_of

# Of the evaluations in a fit so many are each compared, and of batches that cannot be so many are each tried.
_EACH = 4
InFloat32 = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class FirstOfLoader:
    """The first batch of an evaluation loader, as that gave it; a loader is the step's name and its number."""

    batch: Any
    loader: tuple[str, int]


def compare_evaluation(
    batch: Any,
    runner: StepRunner,
    run: RunStep,
    *,
    name: str,
    config: StrategyConfig,
    options: ShardOptions,
    monitored: Collection[str],
    whole_output: WholeOutput,
    predicts: bool = False,
    may_retry: bool = False,
    is_first: bool = True,
) -> tuple[bool, Kinds]:
    """Compare what an evaluation step shows on a crop of the batch, whole and sharded; it leaves no trace. Every rank must call it.

    Args:
        batch: as the loader gave it.
        runner: of the model's steps.
        run: the user's step on a batch.
        name: of the step.
        config: how long a crop is wanted.
        options: which tensors carry the sequence.
        monitored: names of numbers that decide about the run.
        whole_output: makes tensors of tokens whole.
        predicts: the step's output is what counts.
        may_retry: other numbers are raised, and not only warned of, by which nothing is decided.
        is_first: none of this loader was compared before: it is on crops as later batches may be, too.

    Returns: whether the step keeps values for later, those of one device when their tokens are whole; and the kinds of its outputs.
    Raises:
        NotComparedError: one of them does not run; or shows other numbers, with `may_retry`.
        SequenceParallelError: a monitored number, or an output that counts, is not that of one device.
    """
    patterns, ran_whole = runner.context.last_attention_patterns, False
    named: dict[str, Any] = {"name": name, "predicts": predicts}
    run_on = partial(_run_first, runner, run, options, named)
    try:
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            cut = crops_of(batch, runner, config, options)
            crop, own, whole = _whole_on_a_crop(batch, cut, run_on, runner, config, options)
            ran_whole = True
            _read_ahead(crop, own, options, runner, run, name, may_retry=may_retry)
            part = run_part(own, runner, run, options, whole, whole_output, **named)
            decision = decision_of_part(own, runner, run, options, whole, part, **named)
    except Exception as error:  # on all ranks; what is wrong with the step itself, it will say itself
        _raise_not_compared(name, error, ran_whole)
    finally:
        runner.end_without_backward()
        runner.context.last_attention_patterns = patterns
    tried = TriedEvaluation(name, crop, own, monitored, may_retry)
    keeps, agrees = judge(tried, part, runner)
    if is_first and agrees and not runner.context.global_view:
        _judge_as_later(
            tried, (whole, part), partial(_part_of, runner, run, options, whole_output, named), runner, options
        )
    _tell_decision(decision, raises=may_retry or predicts)
    return keeps, part.kinds


def _run_first(
    runner: StepRunner, run: RunStep, options: ShardOptions, named: Mapping[str, Any], own: Crop
) -> WholeRun:
    find_others(own, runner, run, options)
    return run_whole(own, runner, run, options, **named)


def _judge_as_later(
    tried: TriedEvaluation,
    runs: tuple[WholeRun, PartRun],
    of_part: Callable[..., PartRun],
    runner: StepRunner,
    options: ShardOptions,
) -> None:
    """Compare the step on tokens and outcomes as later batches may have them."""
    whole, part = runs
    judge_later_batches(tried, whole, of_part, runner, options)
    judge_other_outcomes(tried, whole, part, partial(of_part, tried.own), runner)


def _tell_decision(decision: SequenceParallelError | None, *, raises: bool) -> None:
    if decision is not None and raises:
        raise decision
    if decision is not None:
        rank_zero_warn(str(decision))


def _part_of(
    runner: StepRunner,
    run: RunStep,
    options: ShardOptions,
    whole_output: WholeOutput,
    named: Mapping[str, Any],
    other: Crop,
    turned: Mapping[Call, Other] = NOTHING_TURNED,
) -> PartRun:
    """Return what a step shows of a rank's part of another crop than the first, or of that with other outcomes."""
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        with CheckedIndices():  # what is shown may be an index
            whole = run_whole(other, runner, run, options, turned=turned, **named)
        try:
            return run_part(other, runner, run, options, whole, whole_output, turned=turned, **named)
        except Exception as error:
            error.ends_steps = True  # type: ignore[attr-defined]
            raise


def _read_ahead(
    crop: Crop, own: Crop, options: ShardOptions, runner: StepRunner, run: RunStep, name: str, *, may_retry: bool
) -> None:
    """Refuse on all ranks what one rank would fail at alone: by its padding, or by places in the whole sequence."""
    check_padding_read(own, options, runner, run, name)
    if may_retry:
        check_part_indices(crop, options, runner, run, name)


def _whole_on_a_crop(
    batch: Any,
    cut: Callable[..., tuple[Crop, Crop]],
    run_on: Callable[[Crop], WholeRun],
    runner: StepRunner,
    config: StrategyConfig,
    options: ShardOptions,
) -> tuple[Crop, Crop, WholeRun]:
    """Return the crops of all groups and of this rank's, and what the step shows of the latter as one device runs it.

    Where it fails on a crop whose length nobody chose it is run on whole sequences: it reads by places in them, or is made for one length.

    Args:
        batch: as the loader gave it.
        cut: makes crops of a length.
        run_on: runs the step.
        runner: of the model's steps.
        config: how long a crop is wanted.
        options: which tensors carry the sequence.
    """
    wanted = None if config.preflight_tokens == "auto" else config.preflight_tokens
    crop, own = cut(wanted=wanted)
    try:
        return crop, own, run_on(own)
    except Exception as error:
        if wanted is not None or comm.is_of_communication(error):
            raise
        tokens = max(comm.gather_objects(max(whole_extent(batch, options)[1:]), runner.groups.world))
        if not crop.tokens < tokens <= LONGER_TOKENS:
            raise
    crop, own = cut(wanted=tokens)
    return crop, own, run_on(own)


def _raise_not_compared(name: str, error: Exception, ran_whole: bool) -> NoReturn:
    if isinstance(error, (PaddingReadError, PartIndexError)):
        raise error  # the step itself would fail, on the rank that holds the padding alone
    why = f"preflight: {name} was not compared with one device: {told_error(error)}"
    raise NotComparedError(why, of_part=ran_whole and not comm.is_of_communication(error)) from error


class FirstEvaluationBatches:
    """The first batch of each evaluation loader, kept until its step begins; a class because it waits for that.

    Args:
        config: of the strategy.
    """

    def __init__(self, config: StrategyConfig) -> None:
        self._config = config
        self._due = False
        self._compared: set[tuple[str, int]] = set()
        self._padded: set[tuple[str, int]] = set()
        self._first: FirstOfLoader | None = None
        self._keeping: set[str] = set()
        self._begun: Counter[tuple[str, int]] = Counter()
        self._failed: Counter[tuple[str, int]] = Counter()
        self._waits: Counter[tuple[str, int]] = Counter()  # of a loader: batches until another is tried
        self._kinds: defaultdict[tuple[str, str], set[Any]] = defaultdict(set)
        self.output_kinds = OutputKinds()
        self.current: FirstOfLoader | None = None  # the batch in progress

    def expect(self, *, sharded: bool) -> None:
        """Begin a run, on parts of sequences or on whole ones."""
        self._due = self._config.preflight and sharded
        self._compared, self._padded, self._first = set(), set(), None
        self._keeping = set()
        self._begun, self._failed, self._waits = Counter(), Counter(), Counter()
        self._kinds.clear()
        self.output_kinds, self.current = OutputKinds(), None

    def keeps(self, name: str) -> bool:
        """Return whether a step keeps tensors for later that are one device's when they are whole; the same on all ranks."""
        return name in self._keeping

    def is_of_new_kind(self, step: str, batch: Any) -> bool:
        """Return whether a batch has entries, or says a task, that none of the step's has had; up to four times each.

        Args:
            step: its name; empty in training.
            batch: as the loader gave it.
        """
        found = False
        for name, kind in {**structure_of(batch), **tasks_of(batch)}.items() if self._due and step else ():
            known = self._kinds[step, name]
            if kind not in known and len(known) < MOST_TASKS:
                found |= bool(known)
                known.add(kind)
        return found

    def offer(self, batch: Any, loader: tuple[str, int], info: SequenceInfo, *, begins: bool = False) -> None:
        """Remember a loader's first batch, the first padded one, and those of a new kind; nothing of training.

        Args:
            batch: as the loader gave it.
            loader: the step's name, empty in training, and its number.
            info: what was sharded: whether it is padded on some rank, or of a new kind.
            begins: whether an evaluation begins with it: what a step shows may begin at a later epoch. Of the first four, the 8th, the 16th
                and so on it is remembered.
        """
        self.current = FirstOfLoader(batch, loader) if loader[0] and self._due else None
        if not loader[0]:
            return
        if begins:
            self._begun[loader] += 1
            times = self._begun[loader]
            if times <= _EACH or times & (times - 1) == 0:
                self._compared.discard(loader)
        if info.is_changed:
            self._compared.discard(loader)
        is_first_padded = info.is_padded and loader not in self._padded
        if self._waits[loader] and not (begins or info.is_changed or is_first_padded):
            self._waits[loader] -= 1
            return
        if self._due and (loader not in self._compared or is_first_padded):
            self._compared.add(loader)
            if info.is_padded:
                self._padded.add(loader)
            self._first = FirstOfLoader(batch, loader)

    @property
    def is_due(self) -> bool:
        """Whether the step in progress is to be compared before it runs."""
        return self._first is not None

    def take(self) -> FirstOfLoader:
        """Return the batch of the step in progress, once."""
        assert self._first is not None
        first, self._first = self._first, None
        return first

    def _try_a_later_one(self, loader: tuple[str, int]) -> None:
        """Note that a batch was not compared. Behind the first four that were not, ever fewer are tried: most will not be, either."""
        self._compared.discard(loader)
        self._failed[loader] += 1
        self._waits[loader] = 0 if (more := self._failed[loader] - _EACH) < 0 else 2**more

    def compare(
        self,
        first: FirstOfLoader,
        runner: StepRunner,
        run: RunStep,
        *,
        name: str,
        options: ShardOptions,
        monitored: Collection[str],
        in_float32: InFloat32 | None,
        whole_output: WholeOutput,
        predicts: bool,
        may_retry: bool = False,
    ) -> None:
        """Compare the step in progress, as `compare_evaluation`; a later one of this loader where that was not possible.

        Args:
            first: the step's batch.
            runner: of the model's steps.
            run: the user's step on a batch.
            name: of the step.
            options: which tensors carry the sequence.
            monitored: names of numbers that decide about the run.
            in_float32: switches autocast off; None where there is none.
            whole_output: makes tensors of tokens whole.
            predicts: the step's output is what counts.
            may_retry: as of `compare_evaluation`.
        """
        try:
            with nullcontext() if in_float32 is None else in_float32():
                keeps, kinds = compare_evaluation(
                    first.batch,
                    runner,
                    run,
                    name=name,
                    config=self._config,
                    options=options,
                    monitored=monitored,
                    whole_output=whole_output,
                    predicts=predicts,
                    may_retry=may_retry,
                    is_first=self._begun[first.loader] <= 1,
                )
        except NotComparedError as error:
            if not (error.of_numbers or error.undecided):
                self._try_a_later_one(first.loader)
            if error.keeps:
                self._keeping.add(name)
            raise
        self._compared.add(first.loader)
        self.output_kinds.note(name, kinds)
        if keeps:
            self._keeping.add(name)
