"""Steps that decide by a number of their batch: a part may stay below a threshold that the whole batch is above, as the crop may.

    if (batch["input_ids"] > 20).sum() > 20: loss = 2 * loss

One device's run is repeated as if what the step compares were larger, and smaller. Where its loss or a gradient is another one then, the number
decides. On parts each rank would decide by a number of its own tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.comparison import averaged, gradient_differences
from lightning_sp.preflight.explain.verdict import relative_differences, tolerance_of
from lightning_sp.preflight.recording.forced_numbers import Forced
from lightning_sp.preflight.recording.read_numbers import Line, numbers_of_parts
from lightning_sp.preflight.trial import Outcome, Trial

# What Hugging Face's interface does by masks and positions is done by the whole ones here.
_CARRIED = ("transformers/modeling_rope_utils.py", "transformers/masking_utils.py", "transformers/integrations/")
# Lines that are forced one by one, where a step has fewer of its own: those are all forced, and come first.
_MOST_LINES = 12


def check_read_numbers(trial: Trial, whole: Outcome, sharded: Outcome) -> None:
    """Refuse a step that decides by a number of its part of the batch. Every rank must call it.

    Args:
        trial: of the step.
        whole: what it gave whole.
        sharded: what it gave on shards.

    Communicates: which lines compare such numbers; two whole runs where there are any, and more where these differ.

    Raises:
        SequenceParallelError: its loss or a gradient depends on such a decision.
    """
    lines = _lines(trial, whole, sharded)
    most = max(_MOST_LINES, sum(not line.is_installed for line in lines))
    for larger in (True, False):
        if lines and _decides(trial, whole, Forced(lines, larger)) is not False:
            for line in [*lines][:most]:
                if _decides(trial, whole, Forced({line: lines[line]}, larger)):
                    raise SequenceParallelError(_message(trial, line, larger=larger))


def _lines(trial: Trial, whole: Outcome, sharded: Outcome) -> dict[Line, int]:
    """Return the lines of all ranks, of the user's first."""
    mesh = trial.context.mesh
    own = numbers_of_parts(whole.read, sharded.read, mesh.data_parallel_size)
    found: dict[Line, int] = {}
    for each in comm.gather_objects(own, trial.control_group):
        found |= {line: max(number, found.get(line, 0)) for line, number in each.items()}
    ordered = sorted(found, key=lambda line: (line.is_installed, line))
    return {line: found[line] for line in ordered if not any(path in line.file for path in _CARRIED)}


def _decides(trial: Trial, whole: Outcome, forced: Forced) -> bool | None:
    """Return whether the whole run gives something else with numbers forced; None where it fails so."""
    try:
        other = replace(trial, forced=forced).whole()
    except SequenceParallelError:
        return None
    if whole.loss is None or other.loss is None:
        return other.loss is not whole.loss
    found = gradient_differences(averaged(whole.loss), averaged(other.loss), whole.gradients, other.gradients)
    largest = max(relative_differences(found).values())
    return math.isnan(largest) or largest > tolerance_of(whole.dtypes)


def _message(trial: Trial, line: Line, *, larger: bool) -> str:
    return (
        f"preflight: training_step decides by a number of its tokens, at {line.describe()}: on {trial.crop} its loss or a gradient is another "
        f"one where that number is {'larger' if larger else 'smaller'}. Each rank would decide by its own part's, which is not the "
        "whole batch's; use global_view=True, in which the step reads whole sequences, or make the number whole first: "
        "lightning_sp.reductions.batch_sum(mask.sum(1)), sequence_max(x)"
    )
