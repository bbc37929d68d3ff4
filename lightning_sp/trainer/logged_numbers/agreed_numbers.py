"""Numbers that the ranks of a sequence show after a validation: the same on all, or named; a monitored one is refused, of groups too.

What a module gathers in its steps and logs at the end of an epoch no preflight sees. Made of each rank's own tokens it is another number on each
rank, and callbacks that monitor it would save, stop or lower the learning rate on some.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.trainer.loops import monitored_names, names_of_evaluation

_TOLERANCE = 1e-6


def watch_numbers(trainer: Trainer, groups: comm.HostGroups) -> None:
    """Compare what ranks of a sequence log, from now on: before any other callback looks at it.

    Args:
        trainer: of the run.
        groups: of the ranks, on a backend for host objects.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [each for each in callbacks if not isinstance(each, AgreedNumbers)]
    if comm.size_of(groups.world or comm.world()) > 1:
        callbacks.insert(0, AgreedNumbers(groups))


class AgreedNumbers(Callback):
    """Compares the logged numbers of each validation over the ranks of a sequence; one that is not monitored is named once."""

    def __init__(self, groups: comm.HostGroups) -> None:
        self._groups = groups
        self._named: set[str] = set()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare. Communicates: the numbers, over the ranks of the sequence, and monitored ones over all."""
        if trainer.sanity_checking:
            return
        monitored = monitored_names(trainer)
        # What training has logged stands beside it, a rank's own time say: the preflight compares that.
        names = sorted({*monitored} & {*trainer.callback_metrics} | {*names_of_evaluation(trainer)})
        values = {name: float(trainer.callback_metrics[name]) for name in names}
        found = differing(comm.gather_objects(values, self._groups.samples))
        decides = {name: value for name, value in values.items() if name in monitored}
        of_groups = differing(comm.gather_objects(decides, self._groups.world)) if monitored else {}
        if of_groups and not any(comm.gather_objects(bool(found), self._groups.world)):
            raise SequenceParallelError(_text_of_groups(of_groups))
        found = {name: each for name, each in found.items() if name in monitored or name not in self._named}
        self._named |= {*found}
        told = _text(found, [name for name in found if name in monitored])
        comm.agree(told if any(name in monitored for name in found) else None, self._groups.world)
        if found:
            rank_zero_warn(told)


def differing(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the numbers that are not the same on all ranks of a sequence, of each rank. Pure."""
    names = [name for name in of_ranks[0] if all(name in each for each in of_ranks)]
    values = {name: [each[name] for each in of_ranks] for name in names}
    return {name: each for name, each in values.items() if not _same(each)}


def _same(values: Sequence[float]) -> bool:
    if any(not math.isfinite(each) for each in values):
        return len({str(each) for each in values}) == 1
    return max(values) - min(values) <= _TOLERANCE * max(map(abs, values))


def _text_of_groups(found: Mapping[str, Sequence[Any]]) -> str:
    listed = "; ".join(f"{name} = {', '.join(f'{each:.6g}' for each in values)}" for name, values in found.items())
    return (
        f"data-parallel groups log other numbers after a validation, of the ranks in order: {listed}. Each was made of a group's own samples; "
        f"{', '.join(found)} is monitored, and checkpoints, early stopping or the learning rate would go by one group's. Log it with "
        "sync_dist=True, or as a torchmetrics metric"
    )


def _text(found: Mapping[str, Sequence[Any]], monitored: Sequence[str]) -> str:
    listed = "; ".join(f"{name} = {', '.join(f'{each:.6g}' for each in values)}" for name, values in found.items())
    text = (
        f"the ranks of one sequence log other numbers after a validation: {listed}. Each was made of a rank's own tokens: use a torchmetrics "
        "metric, lightning_sp.reductions in the step, self.trainer.strategy.unshard(tensor) before tensors are kept, or sync_dist=True for a "
        "mean over equally many tokens"
    )
    if not monitored:
        return text
    return f"{text}. {', '.join(monitored)} is monitored: checkpoints, early stopping or the learning rate would differ between the ranks"
