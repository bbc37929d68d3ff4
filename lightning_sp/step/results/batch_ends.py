"""What hooks at a batch's end are handed: outputs and batch as of one device, after a step on a rank's part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_sp.batch_structure import entries_of, with_entries
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor
from lightning_sp.step.results.output_structure import tensors_of

# What sharding adds to a batch.
_ADDED = ("position_ids", "shift_labels")


def whole_batch(batch: Any, info: SequenceInfo, unshard: Callable[[Tensor, int], Tensor]) -> Any:
    """Return a batch as its loader gave it, from this rank's part. Every rank must call it.

    Args:
        batch: as the step had it.
        info: what was whole about it.
        unshard: gathers the tokens of a tensor along a dim.

    Communicates: one all_gather for each tensor that carries a sequence.
    """
    entries = entries_of(batch)
    if entries is None:
        return batch
    tokens = {
        name: (dim, each.padded_length // each.layout.size)
        for each in info.sequences
        for name, dim in each.dims.items()
    }

    def whole(name: str, value: Any) -> Any:
        if isinstance(value, SequenceTensor):
            return value.whole()
        dim, length = tokens.get(name, (0, -1))
        carries = isinstance(value, Tensor) and value.dim() > dim and value.shape[dim] == length
        return unshard(value, dim) if carries else value

    held = {name: value for name, value in entries.items() if name in info.names or name not in _ADDED}
    return with_entries(batch, {name: whole(name, value) for name, value in held.items()})


def holds_more_than_numbers(outputs: Any) -> bool:
    """Return whether what a step returned has a tensor of a dim or more."""
    return any(each.value.dim() > 0 for each in tensors_of(outputs))
