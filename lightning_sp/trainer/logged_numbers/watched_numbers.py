"""Numbers that training_step logs, and whose agreement in the preflight proves nothing: a share or a count of tokens, 0 in an untrained model.

    self.log("accuracy", (logits.argmax(-1) == labels).float().mean())      on a rank's part: that of its own tokens

While training goes on the ranks of each sequence compare them. A number of the whole is the same on all of them, one of a part is not for long.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sp import comm
from lightning_sp.mesh import SequenceMesh
from lightning_sp.trainer.logged_numbers.replaced_log import given_to_log, replaced_log

# In float32, in which Lightning keeps them, two devices may round the same number otherwise.
_TOLERANCE = 1e-5
_MOST_STEPS = 200


class WatchedNumbers:
    """The numbers of one run's steps; a class because a comparison is in flight from one step to the next, and a warning comes once."""

    def __init__(self) -> None:
        self._told = set[str]()
        self._steps = 0
        self._pending: tuple[Sequence[str], comm.Spread] | None = None

    @contextmanager
    def of_step(
        self, module: LightningModule, names: Collection[str], mesh: SequenceMesh, device: torch.device
    ) -> Iterator[None]:
        """Compare what a step logs under some names. Every rank must enter it.

        Args:
            module: whose step runs.
            names: of numbers that each rank shows as its own, alike on all ranks.
            mesh: of the run.
            device: of the messages between ranks.

        Communicates: an all_reduce of 16 bytes for each name and data-parallel group, if there is a name, in the first 200 steps.
        """
        self.finish()
        watched = sorted({*names} - self._told)
        if not watched or self._steps >= _MOST_STEPS or mesh.layout.size == 1:
            yield
            return
        self._steps += 1
        log = module.log
        found: dict[str, Any] = {}

        def note(*args: Any, **kwargs: Any) -> None:
            given = given_to_log(args, kwargs)
            value = given.get("value")
            if isinstance(value, (Tensor, int, float)):
                found[str(given.get("name"))] = value
            log(*args, **kwargs)

        with replaced_log(module, note):
            yield
        values = [torch.as_tensor(found.get(name, 0.0), dtype=torch.float64, device=device) for name in watched]
        values = [value.detach().mean() for value in values]
        spread = comm.Spread(torch.stack(values), _TOLERANCE, mesh.data_parallel_rank, mesh.data_parallel_size)
        self._pending = watched, spread

    def finish(self) -> None:
        """Read the answer about the last step, and warn of a number that is a rank's own. Every rank must call it."""
        if self._pending is None:
            return
        names, spread = self._pending
        self._pending = None
        wide = [name for name, differs in zip(names, spread.are_too_wide(), strict=True) if differs]
        self._told |= {*wide}
        if wide:
            rank_zero_warn(
                f"training_step logs {', '.join(wide)}, which the ranks of a sequence have made of their own tokens alone: what is shown is of "
                "rank 0's part. The preflight found the same number there by chance. Use a torchmetrics metric, lightning_sp.reductions "
                "(batch_mean(x, mask), unshard(x)), global_view=True, or sync_dist=True for a mean over equally many tokens"
            )
