"""Steps that decide by a number of their batch: a part may stay below a threshold that the whole batch is above, as the crop may.

    if (batch["input_ids"] > 20).sum() > 20: loss = 2 * loss

One device's run is repeated as if what the step compares were larger, and smaller, and with larger numbers where Python gets them. Where its
loss or a gradient is another one then, the number decides. On parts each rank would decide by a number of its own tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from enum import Enum
from functools import partial

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.comparison import averaged, gradient_differences
from lightning_sp.preflight.explain.verdict import relative_differences, tolerance_of
from lightning_sp.preflight.failing_steps import is_check
from lightning_sp.preflight.outcome import Outcome
from lightning_sp.preflight.recording.numbers_read.forced_numbers import Forced
from lightning_sp.preflight.recording.numbers_read.lines_of_parts import (
    Line,
    cuts_of_parts,
    has_other_cuts,
    loops_of_parts,
    numbers_of_groups,
    numbers_of_parts,
)
from lightning_sp.preflight.trial import Trial

# What Hugging Face's interface does by masks and positions is done by the whole ones here.
_CARRIED = ("transformers/modeling_rope_utils.py", "transformers/masking_utils.py", "transformers/integrations/")


_WHOLE_FIRST = "make the number whole first: lightning_sp.reductions.batch_sum(mask.sum(1)), sequence_max(x)"
OF_PARTS = (
    "Each rank would decide by its own part's, which is not the whole batch's; use global_view=True, in which the step reads whole sequences, "
    f"or {_WHOLE_FIRST}"
)
_OVER_GROUPS = (
    "Each data-parallel group would decide by its own rows, about a loss that is of all groups' tokens: neither one device's nor DDP's. "
    f"Either {_WHOLE_FIRST}; or make the loss each group's own, `F.cross_entropy(..., reduction='none').mean()`"
)
HIDDEN = (
    "has a layer that hands numbers of its tokens to Python or NumPy, at {lines}: they are of a rank's part, and nobody sees whether what is "
    "made of them is each token's own, or of all tokens; use global_view=True, in which they are of whole sequences, or compute it by torch"
)
_EACH_ROW = ". Where Python or NumPy deals with each row by itself, global_view=True shows it whole rows"


class Effect(Enum):
    """What forced numbers do to the whole run."""

    NONE = "the same loss and gradients"
    OTHER = "another loss, gradient, or number that later steps may go by"
    KEY = (
        "the same, but it looks something up by them, or keeps something under them, of which later steps may find more"
    )
    CHECKED = "an error that a line of Python raises: a check of its numbers"
    FAILED = "another error: nothing is known"


def check_read_numbers(trial: Trial, whole: Outcome, sharded: Outcome) -> None:
    """Refuse a step that decides by a number of its part of the batch. Every rank must call it.

    Args:
        trial: of the step.
        whole: what it gave whole.
        sharded: what it gave on shards.

    Communicates: which lines compare such numbers; two whole runs where there are any, and more where these differ.

    Raises:
        SequenceParallelError: its loss or a gradient depends on such a decision, or nobody can tell; or it cuts tokens by a number.
    """
    groups, control_group = trial.context.mesh.data_parallel_size, trial.control_group
    _look_at_cuts(trial, whole, sharded)
    _look_at_loops(trial, whole, sharded)
    lines = lines_of_ranks(numbers_of_parts(whole.read, sharded.read, groups), control_group)
    _tell_of_lines(trial, [line for line in lines if line.is_hidden], f"preflight: training_step {HIDDEN}")
    lines = {line: number for line, number in lines.items() if not line.is_hidden}
    # A loss by hand is each group's own, and so is what decides about it, as with DDP. One of all groups' tokens is not.
    of_all_groups = sharded.num_over_groups + sharded.num_means > 0
    over_groups = groups > 1 and any(comm.gather_objects(of_all_groups, control_group))
    others = lines_of_ranks(numbers_of_groups(whole.read, sharded.read), control_group) if over_groups else {}
    forcing = _Forcing(trial, whole, sharded)
    for found, of_groups in ((lines, over_groups), (others, True)):
        search_lines(found, forcing.effect, partial(_refusal, trial, over_groups=of_groups))


def _look_at_cuts(trial: Trial, whole: Outcome, sharded: Outcome) -> None:
    """Find where a step cuts its part of a sequence by a number of Python's, which now takes all of it, and may be another one later.

    A length that grows with the run, from whatever it is made: the optimizer's state, the last gradient's norm. Where it takes some tokens of
    the crop and leaves others, the runs have been compared with that. Where the step can see whole sequences it does, else a warning says so.
    """
    _tell_of_lines(
        trial,
        cuts_of_parts(whole.read, sharded.read),
        "preflight: training_step cuts tokens by a number of Python's ({lines}) that takes all of a rank's part, or none; of the whole "
        "sequence it may take others, now on a longer batch or once the number is another; use global_view=True, in which the step cuts "
        "whole sequences",
    )


def _look_at_loops(trial: Trial, whole: Outcome, sharded: Outcome) -> None:
    """Find loops that a rank's own tokens end. One that goes round once more alone gathers weights for which the others do not come."""
    _tell_of_lines(
        trial,
        loops_of_parts(whole.read, sharded.read),
        "preflight: training_step has a loop that ends by its tokens ({lines}): each rank's own may end it earlier or later, and a rank "
        "that goes round once more alone waits for the others; use global_view=True, in which all ranks go by whole sequences, or end it "
        "by a number of all of them: lightning_sp.reductions.sequence_max(x)",
    )


def _tell_of_lines(trial: Trial, own: Collection[str | Line], words: str) -> None:
    """Refuse a step on parts for lines that any rank has found, or warn of them where the step cannot see whole sequences."""
    found = comm.gather_objects([] if trial.context.global_view else own, trial.control_group)
    lines = sorted({line.describe() if isinstance(line, Line) else line for each in found for line in each})
    if not lines:
        return
    told = words.format(lines=" and ".join(lines[:2]))
    if trial.may_retry:
        raise SequenceParallelError(told)
    rank_zero_warn(told)


def search_lines(
    lines: Mapping[Line, int],
    effect: Callable[[Forced], Effect],
    refusal: Callable[[list[Line], Effect, bool], SequenceParallelError],
) -> None:
    """Raise a refusal where lines decide: together, or one of the user's alone, whose decision others may take back. On all ranks.

    Args:
        lines: of all ranks.
        effect: of numbers forced.
        refusal: of lines, by what they do, and whether their numbers are larger then.
    """
    read = {line: number for line, number in lines.items() if line.is_read}
    for forced in (Forced(lines, True), Forced(lines, False), Forced(read, True, plain=True)):
        if forced.lines:
            _Search(forced, effect, refusal).run()


class _Search:
    """The search for lines that decide, in one direction; a class for it remembers what was tried."""

    def __init__(
        self,
        forced: Forced,
        effect: Callable[[Forced], Effect],
        refusal: Callable[[list[Line], Effect, bool], SequenceParallelError],
    ) -> None:
        self._forced, self._effect_of, self._refusal, self._larger = forced, effect, refusal, forced.larger
        self._tried: dict[frozenset[Line], Effect] = {}

    def run(self) -> None:
        """Refuse the step where lines decide."""
        self._harmless([*self._forced.lines])
        for line in self._forced.lines:
            if not line.is_installed:
                self._harmless([line])

    def _harmless(self, lines: list[Line]) -> list[Line]:
        """Return those of some lines that change nothing, together."""
        effect = self._effect(lines)
        if effect in (Effect.OTHER, Effect.KEY):
            raise self._refusal(self._first_of(lines, effect), effect, self._larger)
        if effect is Effect.NONE:
            return lines
        if len(lines) == 1:
            if effect is Effect.FAILED and not lines[0].may_fail:
                raise self._refusal(lines, effect, self._larger)
            return []
        half = len(lines) // 2
        found = self._harmless(lines[:half]) + self._harmless(lines[half:])
        if len(found) < len(lines):
            return self._harmless(found) if found else []
        if effect is Effect.FAILED and not lines[0].may_fail:
            raise self._refusal(lines, effect, self._larger)
        return lines[:half]

    def _first_of(self, lines: list[Line], effect: Effect) -> list[Line]:
        """Return the line that decides, alone where it can, of some that do together: behind those without which it does not."""
        none, all_of_them = 0, len(lines)
        while all_of_them - none > 1:
            middle = (none + all_of_them) // 2
            if self._effect(lines[:middle]) is effect:
                all_of_them = middle
            else:
                none = middle
        last = lines[none]
        return [last] if self._effect([last]) is effect else lines[:all_of_them]

    def _effect(self, lines: list[Line]) -> Effect:
        key = frozenset(lines)
        if key not in self._tried:
            self._tried[key] = self._effect_of(
                self._forced._replace(lines={line: self._forced.lines[line] for line in lines})
            )
        return self._tried[key]


class _Forcing:
    """Whole runs with numbers forced; a class for it remembers what is the same in two runs."""

    def __init__(self, trial: Trial, whole: Outcome, sharded: Outcome) -> None:
        self._trial, self._whole, self._sharded = trial, whole, sharded
        self._steady: frozenset[str] | None = None  # numbers left that are the same in two runs

    def effect(self, forced: Forced) -> Effect:
        """Return what forced numbers do to the whole run. Every rank must call it."""
        trial, whole = self._trial, self._whole
        try:
            forced = forced.of_run(whole.read.num_calls)
            other = replace(trial, forced=forced).whole()
        except Exception as error:
            return effect_of_error(error, trial.control_group)
        if whole.loss is None or other.loss is None:
            return Effect.NONE if other.loss is whole.loss else Effect.OTHER
        found = gradient_differences(averaged(whole.loss), averaged(other.loss), whole.gradients, other.gradients)
        largest = max(relative_differences(found).values())
        differs = math.isnan(largest) or largest > tolerance_of(whole.dtypes)
        cuts = any(comm.gather_objects(has_other_cuts(whole.read, self._sharded.read, other.read), trial.control_group))
        if differs or cuts or self._leaves_others(other):
            return Effect.OTHER
        return Effect.KEY if any(comm.gather_objects(bool(forced.keys), trial.control_group)) else Effect.NONE

    def _leaves_others(self, other: Outcome) -> bool:
        """Return whether any rank's run leaves other numbers to later steps: a learning rate, a phase. A time is another one in each run."""
        differ = _unlike(self._whole, other)
        if not any(comm.gather_objects(bool(differ), self._trial.control_group)):
            return False
        if self._steady is None:
            again = self._trial.whole()
            self._steady = frozenset(self._whole.left) - _unlike(self._whole, again)
        return any(comm.gather_objects(bool(differ & self._steady), self._trial.control_group))


def effect_of_error(error: Exception, control_group: ProcessGroup | None) -> Effect:
    """Return what an error says of the numbers that were forced; it is raised again where other ranks are its cause. On all ranks."""
    if comm.is_of_communication(error):
        raise error
    return Effect.CHECKED if all(comm.gather_objects(is_check(error), control_group)) else Effect.FAILED


_WHAT = {
    Effect.OTHER: "its loss, a gradient or what it leaves to later steps is another one",
    Effect.KEY: "it looks something up by that number, or keeps something under it, of which another step may find more, also",
    Effect.FAILED: "it fails, so that nobody can tell what it decides,",
}


def _refusal(
    trial: Trial, lines: list[Line], effect: Effect, larger: bool, *, over_groups: bool
) -> SequenceParallelError:
    *others, line = lines
    together = f", with what is read at {' and '.join(each.describe() for each in others)}" if others else ""
    what = _WHAT[effect]
    refusal = SequenceParallelError(
        f"preflight: training_step decides by a number of its tokens, at {line.describe()}: on {trial.crop} {what} where that "
        f"number is {'larger' if larger else 'smaller'}{together}. {_OVER_GROUPS if over_groups else OF_PARTS}"
        f"{_EACH_ROW if over_groups and line.of_tokens else ''}"
    )
    refusal.of_part = not over_groups  # type: ignore[attr-defined]
    return refusal


def lines_of_ranks(own: dict[Line, int], control_group: ProcessGroup | None) -> dict[Line, int]:
    """Return the lines of all ranks, of the user's first. Every rank must call it."""
    found: dict[Line, int] = {}
    for each in comm.gather_objects(own, control_group):
        found |= {line: max(number, found.get(line, 0)) for line, number in each.items()}
    ordered = sorted(found, key=lambda line: (line.is_installed, line))
    return {line: found[line] for line in ordered if not any(path in line.file for path in _CARRIED)}


def _unlike(one: Outcome, other: Outcome) -> frozenset[str]:
    tolerance = tolerance_of(one.dtypes)
    names = one.left.keys() & other.left.keys()
    return frozenset(n for n in names if not math.isclose(one.left[n], other.left[n], rel_tol=tolerance))
