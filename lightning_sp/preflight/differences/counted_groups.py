"""How data-parallel groups count in a loss that each divides by a count of its own: by that count, or alike, as gives one device's gradients.

(a * m).sum() / m.sum()                              by m.sum(): one device divides by the sum of all groups'
(a * m).sum() / (m.sum() + 1)                        likewise, but for the 1, which one device adds once
sum(a_row.sum() / n_row for each row) / len(batch)   alike: one device divides each row by its own count, too
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_sp import comm
from lightning_sp.loss.added_constants import Added, Path, added_constants, counts_with_constants
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
    before, far, allowed = context.by_counts, _distance(whole, sharded), tolerance_of(whole.dtypes)
    is_known = before is not None and far <= allowed
    if is_known and context.added:
        context.added_is_told |= _tells_again(trial, sharded)
    if is_known or not math.isfinite(far):
        return sharded
    if not any(differ for _, differ in of_ranks):
        added = _with_constants(trial, whole, sharded) if far > allowed and context.has_own_terms else None
        return sharded if added is None else added
    context.by_counts = not before
    other = trial.sharded()
    far_otherwise = _distance(whole, other)
    if min(far, far_otherwise) > allowed and (added := _with_constants(trial, whole, sharded)) is not None:
        return added
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


def _with_constants(trial: Trial, whole: Outcome, sharded: Outcome) -> Outcome | None:
    """Return a step whose groups count so but for what is added to their counts, if that is one device's; another trial must tell it again.

    Communicates: small messages on the host, and one more step on shards where something is added.
    """
    context = trial.context
    if context.added is not None or context.counts_tried:
        return None
    before = context.by_counts
    context.added = _constants(trial, whole, sharded)
    if context.added is not None:
        context.by_counts, context.added_is_told = True, False
        other = trial.sharded()
        if _distance(whole, other) <= tolerance_of(whole.dtypes):
            context.told_by = _counts(sharded, context.added)
            return other
    context.by_counts, context.added = before, None
    return None


def _tells_again(trial: Trial, sharded: Outcome) -> bool:
    """Return whether a trial that agrees has other counts than the one that has told what is added to them. Every rank must call it."""
    own = _counts(sharded, trial.context.added) != trial.context.told_by
    return any(comm.gather_objects(own, trial.control_group))


def _counts(sharded: Outcome, added: Added) -> list[float]:
    return [each for terms in sharded.terms for each in counts_with_constants(terms or (), added)]


def _constants(trial: Trial, whole: Outcome, sharded: Outcome) -> Added | None:
    mesh = trial.context.mesh
    of_ranks = comm.gather_objects((mesh.data_parallel_rank, sharded.terms, whole.terms), trial.control_group)
    of_groups = {group: terms for group, terms, _ in of_ranks}
    losses, of_whole = [*of_groups.values()], of_ranks[0][2]
    if trial.batch.rows != trial.own.rows * len(losses) or any(len(each) != len(of_whole) for each in losses):
        return None
    found: dict[Path, Sequence[tuple[int, float]]] = {}
    for of_loss, *of_group in zip(of_whole, *losses, strict=True):
        if of_loss is None or None in of_group:
            return None
        for path, constants in (added_constants(of_group, of_loss) or {}).items():
            if found.setdefault(path, constants) != constants:
                return None
    return found or None
