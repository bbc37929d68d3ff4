"""What the runs of an evaluation step mean: it is one device's, a warning, or a refusal; on its first batch, and as later ones may be."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sp import comm
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.crops.crop import Crop
from lightning_sp.preflight.crops.later_batches import try_later_batches
from lightning_sp.preflight.evaluation.evaluation_runs import PartRun, WholeRun
from lightning_sp.preflight.evaluation.outputs import describe_kept, refuse_differences
from lightning_sp.preflight.failing_steps import say_not_compared
from lightning_sp.preflight.numbers import (
    coarse_numbers,
    counted_once,
    described,
    described_coarse,
    differences,
    rounded_numbers,
)
from lightning_sp.preflight.recording.compared import Compared, Entry
from lightning_sp.step.runner import StepRunner


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
class TriedEvaluation:
    """An evaluation step that was run on a crop.

    Args:
        name: of the step.
        crop: of all data-parallel groups.
        own: of this rank's group.
        monitored: names of numbers that decide about the run.
        may_retry: other numbers are raised, and not only warned of, by which nothing is decided.
    """

    name: str
    crop: Crop
    own: Crop
    monitored: Collection[str]
    may_retry: bool

    @property
    def in_words(self) -> str:
        """The step and the crop."""
        return f"{self.name} on a crop of {self.own.rows} x {self.crop.tokens} tokens"


def judge(tried: TriedEvaluation, part: PartRun, runner: StepRunner) -> tuple[bool, bool]:
    """Raise, or warn of, what is not one device's. Every rank must call it.

    Returns:
        Whether the step keeps what one device would, and whether there is nothing to warn of.

    Raises:
        NotComparedError: it shows other numbers, with `may_retry`.
        SequenceParallelError: a monitored number, or an output that counts, is not that of one device.
    """
    of_ranks: list[PartRun] = comm.gather_objects(part, runner.groups.world)
    numbers = [each.numbers for each in of_ranks]
    runner.context.logged_once.setdefault(tried.name, {}).update(counted_once(numbers))
    told = tell_differences(tried, of_ranks, tried.in_words)
    keeps = part.keeps and not any(each.kept for each in of_ranks)
    tokens, may_retry = tried.own.rows * tried.crop.tokens, tried.may_retry
    by_chance = coarse_numbers(numbers, tokens) | rounded_numbers(numbers)
    if may_retry and by_chance and not runner.context.global_view:
        raise NotComparedError(described_coarse(by_chance, tried.in_words), undecided=True, keeps=keeps)
    return keeps, not told


def judge_later_batches(
    tried: TriedEvaluation,
    whole: WholeRun,
    run_on: Callable[[Crop], PartRun],
    runner: StepRunner,
    options: ShardOptions,
) -> None:
    """Compare on crops as later batches may be, as `judge` does, where the step runs on them. Every rank must call it.

    Args:
        tried: the step on the first batch.
        whole: what it has shown there.
        run_on: runs it on another crop of this rank's group, whole and on parts.
        runner: of the model's steps.
        options: which tensors carry the sequence.
    """
    mesh, world = runner.context.mesh, runner.groups.world

    def attempt(_: Crop, other: Crop, words: str) -> bool:
        patterns = runner.context.last_attention_patterns
        try:
            part = run_on(other)
        except Exception as error:  # on all ranks
            if comm.is_of_communication(error):
                raise
            say_not_compared(f"{tried.name} is not compared with {words}", error)
            return False
        finally:
            runner.end_without_backward()
            runner.context.last_attention_patterns = patterns
        tell_differences(tried, comm.gather_objects(part, world), f"{tried.in_words} with {words}")
        return True

    compared: dict[Entry, Compared] = {}
    for each in comm.gather_objects(whole.read.compared, world):  # of each group's own rows
        compared |= each
    first_row = mesh.data_parallel_rank % (tried.crop.rows // tried.own.rows) * tried.own.rows
    try_later_batches(tried.crop, tried.own, first_row, compared, options, mesh.layout, attempt)


def tell_differences(tried: TriedEvaluation, of_ranks: list[PartRun], step: str) -> bool:
    """Raise, or warn of, what is not one device's; return whether something is not."""
    if differ := differences([each.numbers for each in of_ranks]):
        _tell(described(differ, step, tried.monitored), tried.may_retry)
    refuse_differences([each.outputs for each in of_ranks], step)
    if kept := describe_kept([each.kept for each in of_ranks], step):
        _tell(kept, tried.may_retry)
    return bool(differ or kept)


def _tell(text: str, may_retry: bool) -> None:
    if may_retry:
        raise NotComparedError(text, of_numbers=True)
    rank_zero_warn(text)
