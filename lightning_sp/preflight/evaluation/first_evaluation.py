"""The first batch of an evaluation: a crop of it through the user's own step, whole and sharded, and what it shows compared.

Of validation and test the numbers, of a prediction what the step returns. Autocast is switched off meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sp import comm
from lightning_sp.config import StrategyConfig
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.errors import SequenceParallelError, told_error
from lightning_sp.preflight.crops.crop import Crop, whole_extent
from lightning_sp.preflight.crops.shared_crop import LONGER_TOKENS, crops_of
from lightning_sp.preflight.crops.shorter import RunStep
from lightning_sp.preflight.evaluation.evaluation_runs import (
    PartRun,
    WholeOutput,
    WholeRun,
    decision_of_part,
    find_others,
    run_part,
    run_whole,
)
from lightning_sp.preflight.evaluation.outputs import describe_kept, refuse_differences
from lightning_sp.preflight.indices.padding import PaddingReadError, check_padding_read
from lightning_sp.preflight.indices.part_indices import PartIndexError, check_part_indices
from lightning_sp.preflight.numbers import (
    coarse_numbers,
    counted_once,
    described,
    described_coarse,
    differences,
)
from lightning_sp.step.runner import StepRunner

# Of the evaluations in a fit so many are each compared.
_EACH = 4
InFloat32 = Callable[[], AbstractContextManager[None]]


class NotComparedError(SequenceParallelError):
    """An evaluation step does not run on a crop.

    Args:
        message: why.
        of_part: whether it runs whole, and not sharded.
        of_numbers: whether it runs, and shows other numbers, by which nothing is decided.
        undecided: likewise, and shows numbers that may agree by chance.
        keeps: then, what `compare_evaluation` would have returned.
    """

    def __init__(
        self,
        message: str,
        *,
        of_part: bool = True,
        of_numbers: bool = False,
        undecided: bool = False,
        keeps: bool = False,
    ) -> None:
        super().__init__(message)
        self.of_part, self.of_numbers, self.undecided, self.keeps = of_part, of_numbers, undecided, keeps


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
) -> bool:
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

    Returns:
        Whether the step keeps values for later, in lists and dicts of the module: those of one device when their tokens are whole.

    Raises:
        NotComparedError: one of them does not run; or shows other numbers, with `may_retry`.
        SequenceParallelError: a monitored number, or an output that counts, is not that of one device.
    """
    patterns, ran_whole = runner.context.last_attention_patterns, False
    try:
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            cut = crops_of(batch, runner, config, options)

            def run_on(own: Crop) -> WholeRun:
                find_others(own, runner, run, options)
                return run_whole(own, runner, run, options, name=name, predicts=predicts)

            crop, own, whole = _whole_on_a_crop(batch, cut, run_on, runner, config, options)
            ran_whole = True
            _read_ahead(crop, own, options, runner, run, name, may_retry=may_retry)
            part = run_part(own, runner, run, options, whole, whole_output, name=name, predicts=predicts)
            decision = decision_of_part(own, runner, run, options, whole, part, name=name, predicts=predicts)
    except Exception as error:  # on all ranks; what is wrong with the step itself, it will say itself
        _raise_not_compared(name, error, ran_whole)
    finally:
        runner.end_without_backward()
        runner.context.last_attention_patterns = patterns
    keeps = _judge(part, runner, name, (own.rows, crop.tokens), monitored, may_retry=may_retry)
    if decision is not None and (may_retry or predicts):
        raise decision
    if decision is not None:
        rank_zero_warn(str(decision))
    return keeps


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


def _judge(
    part: PartRun, runner: StepRunner, name: str, crop: tuple[int, int], monitored: Collection[str], *, may_retry: bool
) -> bool:
    """Return whether the step keeps what one device would; raise, or warn of, what is not one device's. Every rank must call it."""
    of_ranks: list[PartRun] = comm.gather_objects(part, runner.groups.world)
    numbers = [each.numbers for each in of_ranks]
    runner.context.logged_once.setdefault(name, {}).update(counted_once(numbers))
    rows, tokens = crop
    step = f"{name} on a crop of {rows} x {tokens} tokens"
    if differ := differences(numbers):
        _tell(described(differ, step, monitored), may_retry)
    refuse_differences([each.outputs for each in of_ranks], step)
    if kept := describe_kept([each.kept for each in of_ranks], step):
        _tell(kept, may_retry)
    keeps = part.keeps and not kept
    if may_retry and not runner.context.global_view and (coarse := coarse_numbers(numbers, rows * tokens)):
        raise NotComparedError(described_coarse(coarse, step), undecided=True, keeps=keeps)
    return keeps


def _raise_not_compared(name: str, error: Exception, ran_whole: bool) -> NoReturn:
    if isinstance(error, (PaddingReadError, PartIndexError)):
        raise error  # the step itself would fail, on the rank that holds the padding alone
    why = f"preflight: {name} was not compared with one device: {told_error(error)}"
    raise NotComparedError(why, of_part=ran_whole and not comm.is_of_communication(error)) from error


def _tell(text: str, may_retry: bool) -> None:
    if may_retry:
        raise NotComparedError(text, of_numbers=True)
    rank_zero_warn(text)


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

    def expect(self, *, sharded: bool) -> None:
        """Begin a run, on parts of sequences or on whole ones."""
        self._due = self._config.preflight and sharded
        self._compared, self._padded, self._first = set(), set(), None
        self._keeping = set()
        self._begun = Counter()

    def keeps(self, name: str) -> bool:
        """Return whether a step keeps tensors for later that are one device's when they are whole; the same on all ranks."""
        return name in self._keeping

    def offer(self, batch: Any, loader: tuple[str, int], *, begins: bool = False, padded: bool = False) -> None:
        """Remember a loader's first batch, and the first padded one.

        Args:
            batch: as the loader gave it.
            loader: the step's name, empty in training, and its number.
            begins: whether an evaluation begins with it: what a step shows may begin at a later epoch. Of the first four, the 8th, the 16th
                and so on it is remembered.
            padded: whether it is padded.
        """
        if begins:
            self._begun[loader] += 1
            times = self._begun[loader]
            if times <= _EACH or times & (times - 1) == 0:
                self._compared.discard(loader)
        if self._due and loader[0] and (loader not in self._compared or (padded and loader not in self._padded)):
            self._compared.add(loader)
            if padded:
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
                keeps = compare_evaluation(
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
                )
        except NotComparedError as error:
            if not (error.of_numbers or error.undecided):
                self._compared.discard(first.loader)
            if error.keeps:
                self._keeping.add(name)
            raise
        self._compared.add(first.loader)
        if keeps:
            self._keeping.add(name)
