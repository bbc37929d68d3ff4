"""What a batch weighs in an epoch's mean where nobody says `batch_size`: by Lightning the first dim of its first tensor, whole.

(B, S)  rows      the same on a rank's part
(S, B)  tokens    S, and not the s of this rank, padded
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_sp.batch_structure import entries_of
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.trainer.logged_numbers.loop_results import LoopResults


class EpochWeights(LoopResults):
    """How batches weigh in what the loops of a trainer log: as whole ones.

    Args:
        batch: gives the batch in progress.
    """

    method = "_extract_batch_size"

    def __init__(self, batch: Callable[[], SequenceInfo | None]) -> None:
        super().__init__()
        self._batch = batch

    def _instead(self, results: Any, value: Any, batch_size: int | None, meta: Any) -> int:
        is_known = batch_size is not None or results.batch_size is not None
        found: int = type(results)._extract_batch_size(results, value, batch_size, meta)
        if is_known or results.batch_size is None or (info := self._batch()) is None:
            return found
        results.batch_size = whole_extent(results.batch, info, found)  # it stands for all that this batch logs
        return int(results.batch_size)


def whole_extent(batch: Any, info: SequenceInfo, found: int) -> int:
    """Return what the first dim of a batch's first tensor is in the whole batch. Pure.

    Args:
        batch: this rank's part of it.
        info: what was whole.
        found: that of the part.
    """
    name = next((name for name, each in (entries_of(batch) or {}).items() if isinstance(each, Tensor)), None)
    for sequence in info.all_sequences:
        if name is not None and sequence.dims.get(name) == 0 and sequence.part_and_whole[0] == found:
            return sequence.length
    return found
