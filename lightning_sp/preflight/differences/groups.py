"""A loss of each data-parallel group's own rows, averaged over the groups as DDP averages it: one device has another on all rows together.

    loss of one device on all rows        != mean over groups of the loss on each group's rows, whole sequences        (accepted, and said)
    loss of one device on all rows, whole == sharded                                                                   (what `run` compares)

Losses and reductions that are global by themselves stay so in this second reference: only sequences are whole in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext, Step
from lightning_sp.layout import SequenceLayout
from lightning_sp.preflight.comparison import averaged, gradient_differences
from lightning_sp.preflight.explain.verdict import Agreement, relative_differences, tolerance_of
from lightning_sp.preflight.outcome import Outcome
from lightning_sp.preflight.trial import Trial


def averages_groups(trial: Trial, whole: Outcome, sharded: Outcome) -> bool:
    """Return whether a loss may be a mean over data-parallel groups: there are some, and no number of all of them was divided by one's rows.

    Such a loss is one device's times the number of groups. Of whole sequences every loss is DDP's. Every rank must call it.

    Communicates: one all_reduce of a number.
    """
    mesh = trial.context.mesh
    groups = mesh.data_parallel_size
    if groups == 1 or mesh.layout.size == 1 or sharded.loss is None or whole.loss is None:
        return groups > 1
    if sharded.num_sums and sharded.num_over_groups:
        return False
    times = float(averaged(sharded.loss)) / (float(whole.loss.detach()) or 1.0)
    return not (sharded.num_over_groups and abs(times - groups) <= groups * tolerance_of(whole.dtypes))


def with_sums_settled(trial: Trial, whole: Outcome, sharded: Outcome) -> Outcome:
    """Return a step on shards whose sums of cross entropies are over the rows that make it one device's, if any do: a group's, or all.

        sum / len(batch)                 a group's: the mean over groups, as DDP has it, is one device's
        sum / batch_sum(labels != -100)  of all groups

    It tries the step once more, where it has such sums beside reductions over all groups. Later steps follow what was found.
    """
    context = trial.context
    if context.mesh.data_parallel_size == 1 or not sharded.num_sums or whole.loss is None:
        return sharded
    if not sharded.num_over_groups and not context.sums_over_groups:
        return sharded
    first = context.sums_over_groups = bool(context.sums_over_groups)
    if _agrees(whole, sharded):
        return sharded
    context.sums_over_groups = not first
    other = trial.sharded()
    if _agrees(whole, other):
        return other
    if not bool(torch.isfinite(whole.loss.detach())):
        context.sums_over_groups = None
        return sharded
    # Neither is one device's: what reductions make is of all groups.
    context.sums_over_groups = bool(sharded.num_over_groups)
    return sharded if context.sums_over_groups == first else other


def beside_one_device(found: Agreement, trial: Trial, whole: Outcome, sharded: Outcome) -> Agreement:
    """Return an agreement of groups apart with one device's loss, and whether that and its gradients are the sum of the groups'."""
    assert whole.loss is not None
    assert sharded.loss is not None
    loss, groups = float(whole.loss.detach()), trial.context.mesh.data_parallel_size
    added = {name: None if each is None else each * groups for name, each in sharded.gradients.items()}
    differences = gradient_differences(whole.loss, averaged(sharded.loss) * groups, whole.gradients, added)
    alike = all(each <= tolerance_of(whole.dtypes) for each in relative_differences(differences).values())
    return replace(found, loss_of_one_device=loss, adds_up_rows=alike and loss != 0)


def _agrees(whole: Outcome, sharded: Outcome) -> bool:
    if whole.loss is None or sharded.loss is None:
        return False
    found = gradient_differences(averaged(whole.loss), averaged(sharded.loss), whole.gradients, sharded.gradients)
    return all(each <= tolerance_of(whole.dtypes) for each in relative_differences(found).values())


def trial_of_groups(trial: Trial, run: Callable[[], Any], batch: SequenceInfo) -> Trial:
    """Return a trial whose whole run is that of this rank's group alone.

    Args:
        trial: whose whole run has the rows of all groups.
        run: runs training_step on the whole crop of this rank's group.
        batch: what that holds.
    """

    def whole() -> Any:
        with _groups_apart(trial.context, batch):
            return run()

    return replace(trial, run_whole=whole, batch=batch)


@contextmanager
def _groups_apart(context: SequenceContext, batch: SequenceInfo) -> Iterator[None]:
    """Let losses and reductions see a step of whole sequences, whose data-parallel groups are those of the run."""
    mesh = context.mesh
    context.mesh, context.whole_step = (
        replace(mesh, layout=SequenceLayout()),
        Step(batch=batch, token_group=mesh.token_group),
    )
    try:
        yield
    finally:
        context.mesh, context.whole_step = mesh, None
