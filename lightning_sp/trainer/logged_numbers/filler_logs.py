"""What Lightning logs of a batch that holds fillers on some rank: a filler's numbers take part in the message, and count for nothing.

    self.log("loss", loss, on_epoch=True, sync_dist=True)        7 rows on 2 groups: a mean over 7, not over 8
    self.log("rows", 1.0, reduce_fx="sum", sync_dist=True)       7 of an epoch, 1 of its last step

Of a step of training on unequally many rows a mean over ranks is one over rows, too.

Other ranks' messages need every rank: a log is made on all, and what it adds is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.trainer.logged_numbers.loop_results import LoopResults

_NEUTRAL = {"max": float("-inf"), "min": float("inf")}  # of a largest and a least number; of a sum 0


class FillerLogs(LoopResults):
    """Lightning's logged numbers while a run is in progress: fillers are left out of them.

    Args:
        batch: gives the batch in progress.
    """

    method = "update_metrics"

    def __init__(self, batch: Callable[[], SequenceInfo | None]) -> None:
        super().__init__()
        self._batch = batch
        self._counts: float | None = None

    def reduced(
        self, number: Any, op: Any, reduce: Callable[[Any, Any], Any], total: Callable[[Tensor], Tensor]
    ) -> Any:
        """Return a number reduced over ranks; in a step, or while it is logged, beside fillers, over those ranks alone whose rows count.

        Args:
            number: of this rank.
            op: "mean", "avg", "sum", "max" or "min".
            reduce: reduces a number by an operation. Every rank must call it, and the other one.
            total: adds up a number over the ranks that a mean is over.
        """
        if self._counts is None or not isinstance(number, Tensor):
            return reduce(number, op)
        if (op := str(op).lower()) in ("mean", "avg"):
            count = total(torch.full_like(number, self._counts))
            return total(number * self._counts if self._counts else torch.zeros_like(number * 1.0)) / count
        return reduce(number if self._counts else torch.full_like(number, _NEUTRAL.get(op, 0.0)), op)

    def _instead(self, results: Any, key: str, value: Any, batch_size: int) -> None:
        own, info = partial(type(results).update_metrics, results, key, value, batch_size), self._batch()
        # Hooks at an epoch's end log numbers of no batch.
        if info is None or not info.counts_apart(trains=results.training) or results.batch is None:
            own()
            return
        result = results[key]
        of_ranks = result.is_tensor and result.meta.sync.should
        if info.is_filler and result.is_tensor and not of_ranks and not results.training:
            # This rank's own number, of an evaluation: without a row of its own it has none to show.
            result.has_reset = not result.update_called
            return
        taken_back = info.is_filler and of_ranks and result.meta.on_epoch
        before = {name: getattr(result, name) for name in result._defaults} if taken_back else {}
        with self.beside(info, info.rows if results.training else 1):
            own()
        for name, kept in before.items():
            setattr(result, name, kept.to(getattr(result, name).dtype))

    @contextmanager
    def beside(self, info: SequenceInfo, rows: int = 1) -> Iterator[None]:
        """Count what is reduced in the block on the ranks alone whose rows count, in a mean by their rows."""
        before, self._counts = self._counts, 0.0 if info.is_filler else float(rows)
        try:
            yield
        finally:
            self._counts = before

    def counted(self, group: ProcessGroup | None) -> list[bool] | None:
        """Return of each rank whether what is gathered in the block in progress is of rows that count; None where all is.

        Communicates: that, where groups have unequally many.
        """
        return None if self._counts is None else comm.gather_objects(bool(self._counts), group)
