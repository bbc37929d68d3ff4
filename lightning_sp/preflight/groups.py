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

from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext, Step
from lightning_sp.layout import SequenceLayout
from lightning_sp.preflight.trial import Outcome, Trial


def averages_groups(trial: Trial, sharded: Outcome) -> bool:
    """Return whether a loss may be a mean over data-parallel groups: there are some, and no sum over all of them is in it.

    Such a sum is divided by something. If that is of one group's rows, the loss is wrong by the number of groups.
    """
    return trial.context.mesh.data_parallel_size > 1 and not sharded.num_sums


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
    context.mesh, context.whole_step = replace(mesh, layout=SequenceLayout()), Step(batch=batch)
    try:
        yield
    finally:
        context.mesh, context.whole_step = mesh, None
