"""How data-parallel groups count in a loss that each divides by a count of its own: by that count, or alike, as gives one device's gradients.

(a * m).sum() / m.sum()                              by m.sum(): one device divides by the sum of all groups'
sum(a_row.sum() / n_row for each row) / len(batch)   alike: one device divides each row by its own count, too
"""

from __future__ import annotations

import math

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_sp import comm
from lightning_sp.loss.counted_terms import counts_differ, has_terms
from lightning_sp.preflight.comparison import gradient_differences
from lightning_sp.preflight.differences.groups import with_sums_settled
from lightning_sp.preflight.explain.verdict import relative_differences, tolerance_of
from lightning_sp.preflight.outcome import Outcome
from lightning_sp.preflight.trial import Trial

# One way is right where the other one is so many times as far off.
_CLEARLY = 10.0
# Of what is allowed, what says nothing.
_ROUNDING = 1e-2


def settled(trial: Trial, whole: Outcome, sharded: Outcome) -> Outcome:
    """Return a step on shards whose data-parallel groups count as is one device's, if any way is. Later steps follow what was found.

    Args:
        trial: of the step.
        whole: what it gave whole.
        sharded: what it gave on shards, as groups count by now.

    Communicates: small messages on the host; one more step on shards where groups have other counts and it is not known how they count.
    """
    sharded = with_sums_settled(trial, whole, sharded)
    context = trial.context
    if context.mesh.data_parallel_size == 1 or whole.loss is None or not sharded.counts:
        return sharded
    own = any(has_terms(each) for each in sharded.counts), any(counts_differ(each) for each in sharded.counts)
    of_ranks = comm.gather_objects(own, trial.control_group)
    context.has_own_terms |= any(has for has, _ in of_ranks)
    before, far = context.by_counts, _distance(whole, sharded)
    is_known = before is not None and far <= tolerance_of(whole.dtypes)
    if is_known or not math.isfinite(far) or not any(differ for _, differ in of_ranks):
        return sharded
    context.by_counts = not before
    other = trial.sharded()
    allowed, far_otherwise = tolerance_of(whole.dtypes), _distance(whole, other)
    least = allowed * _ROUNDING
    if max(far_otherwise, least) * _CLEARLY < far:
        if context.by_counts:
            rank_zero_info(
                "preflight: data-parallel groups count by what each divides its loss by, as one device counts their rows"
            )
        return other
    is_open = before is None and far <= allowed and max(far, least) * _CLEARLY >= far_otherwise
    context.by_counts = None if is_open else False
    return other if before else sharded


def _distance(whole: Outcome, sharded: Outcome) -> float:
    """Return the largest relative difference of a gradient; what a step sees of its loss is a group's own, however groups count."""
    zero = torch.zeros((), dtype=torch.float64, device=whole.loss.device if whole.loss is not None else None)
    found = relative_differences(gradient_differences(zero, zero, whole.gradients, sharded.gradients))
    return max((each for name, each in found.items() if name), default=0.0)
