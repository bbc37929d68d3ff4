"""`self.log(..., reduce_fx="sum", sync_dist=True)` where ranks share a sequence: what all have counts once, parts add up.

    a loss, a number of rows       the same on the ranks of a sequence      added up over data-parallel groups
    a count of a rank's tokens     each rank's own                          added up over the world

Which of the two a number is, the preflight tells by its name (`preflight/numbers.py:counted_once`). Without it the values tell, with a warning
where they are the same on all ranks of each sequence: one with a fraction is taken for theirs together, a whole number for each rank's own. In
the global view, and of hooks behind the preflight, which have the whole batch, what is the same is theirs together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.mesh import SequenceMesh
from lightning_sp.trainer.logged_numbers.replaced_log import given_to_log, replaced_log


class LoggedSums:
    """The sums that a run's steps log; a class because a warning comes once, and not of what the preflight has told."""

    def __init__(self) -> None:
        self._warned = set[str]()
        self._of_ranks: set[str] = set()  # names of sums that each rank has a part of
        self._name: str | None = None  # of the number that is being logged

    @contextmanager
    def of_step(self, module: LightningModule, once: Mapping[str, bool], mesh: SequenceMesh) -> Iterator[None]:
        """Let a step's sums add up over the ranks that have parts of them.

        Args:
            module: whose step runs.
            once: by the name of a sum, whether the ranks of a sequence have it together.
            mesh: of the run.
        """
        if not once:
            yield
            return
        self._of_ranks |= {name for name, together in once.items() if not together}
        log = module.log

        def log_once(*args: Any, **kwargs: Any) -> None:
            given = given_to_log(args, kwargs)
            self._name = given.get("name", "")
            if once.get(self._name) and given.get("sync_dist_group") is None:
                kwargs["sync_dist_group"] = mesh.data_group
                _follow_group(module, self._name, mesh.data_group)
            try:
                log(*args, **kwargs)
            finally:
                self._name = None

        with replaced_log(module, log_once):
            yield

    def add_up(
        self,
        value: Tensor,
        mesh: SequenceMesh,
        world: ProcessGroup | None,
        names: Collection[str] = (),
        *,
        is_whole: bool = False,
        place: str = "",
    ) -> Tensor:
        """Return the sum of a number of which its values tell how it adds up. Every rank must call it.

        Args:
            value: of this rank: one number, by hand more.
            mesh: of the run.
            world: all ranks, on a backend for host objects.
            names: under which it may be logged, where no step is logging it now.
            is_whole: it is of a hook, or a kind of step, that sees whole sequences.
            place: the user's line that adds it up by hand; empty where it is logged.

        Communicates: the value of each rank.
        """
        # Ranks that split weights log the same.
        numbers = comm.gather_objects(_exact(value), world)[:: mesh.tensor_parallel_size]
        of_ranks = torch.stack(numbers).view(-1, mesh.layout.size, *value.shape)
        alike = bool((of_ranks == of_ranks[:, :1]).all()) and bool(of_ranks.any())
        if not alike or (not is_whole and not place and self._is_told(names)):
            return of_ranks.sum((0, 1)).to(value)
        once = is_whole or bool((of_ranks != of_ranks.round()).any())
        if not is_whole:
            self._warn(of_ranks[0, 0], mesh, names, once=once, place=place)
        if not once:
            return of_ranks.sum((0, 1)).to(value)
        # Of one group it is what this rank has, with its graph: one device's.
        return value if len(of_ranks) == 1 and place else of_ranks[:, 0].sum(0).to(value)

    def _warn(self, value: Tensor, mesh: SequenceMesh, names: Collection[str], *, once: bool, place: str) -> None:
        taken = "the whole sequence's, and counts once" if once else "each rank's own, and added up over all ranks"
        name = self._name or ", ".join(sorted(names)) or "a number"
        given = f'{name}, logged with reduce_fx="sum", sync_dist=True,'
        topic, group = (place, "group") if place else (name, "sync_dist_group")
        if place:
            given = f'what strategy.reduce(..., reduce_op="sum") is given ({place})'
        if topic in self._warned:
            return
        self._warned.add(topic)
        shown = f"{float(value):g}" if value.numel() == 1 else "the same"
        rank_zero_warn(
            f"{given} is {shown} on each of the {mesh.layout.size} ranks of a sequence, and no trial has told whose it is. It is taken for "
            f"{taken}. {group}=self.trainer.strategy.data_parallel_group counts it once, {group}=torch.distributed.group.WORLD says that it is "
            "each rank's own"
        )

    def _is_told(self, names: Collection[str]) -> bool:
        """Return whether the preflight has told that each rank has a part of it."""
        names = names if self._name is None else [self._name]
        return bool(names) and self._of_ranks.issuperset(names)


def _exact(value: Tensor) -> Tensor:
    value = value.detach().cpu()
    return value.double() if value.is_floating_point() else value


def _follow_group(module: LightningModule, name: str, group: ProcessGroup) -> None:
    """Let what was logged of a name before a trial told whose it is be added up over the same ranks: Lightning takes one way for a name."""
    results = module.trainer._results
    for result in results.values() if results is not None else ():
        meta = result.meta
        if meta.name == name and meta.fx == module._current_fx_name and meta.sync.group is None:
            meta.sync.group = group
