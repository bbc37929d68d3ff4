"""A batch in the global view: what of it carries the sequence shows the whole, as the loader gave it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp.batch_structure import entries_of, is_plain_dict, with_entries
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.global_view.table import dispatch
from lightning_sp.global_view.tensors.placement import Placement, Storage
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor


def global_batch(
    batch: Any,
    info: SequenceInfo,
    *,
    rank: int,
    group: ProcessGroup,
    attend: Callable[..., Tensor],
    note_reduction: Callable[[], None],
    agree: Callable[[str | None], None],
    own_draws: Callable[[], AbstractContextManager[None]],
    draws_whole: bool = False,
) -> Any:
    """Return a batch whose tensors of the sequence show the whole.

    Args:
        batch: this rank's part.
        info: what was whole.
        rank: of this process among those that share the sequence.
        group: these ranks.
        attend: as of `Storage`.
        note_reduction: likewise.
        agree: likewise.
        own_draws: likewise.
        draws_whole: likewise.
    """
    placements: dict[str, Placement] = {}
    for number, each in enumerate(info.all_sequences):
        storage = Storage(
            layout=each.layout,
            rank=rank,
            capacity=each.padded_length,
            group=group,
            attend=attend,
            note_reduction=note_reduction,
            dispatch=dispatch,
            sequence=each,
            agree=agree,
            own_draws=own_draws,
            draws_whole=draws_whole,
            number=number,
        )
        placements |= {name: Placement(storage=storage, dim=dim, length=each.length) for name, dim in each.dims.items()}
    if isinstance(batch, Tensor):
        return SequenceTensor(batch, *placements.values())
    entries = entries_of(batch)
    assert entries is not None
    made = with_entries(batch, {name: _shown(value, placements.get(name)) for name, value in entries.items()})
    return type(batch)(made) if is_plain_dict(batch) else made


def _shown(value: Any, placement: Placement | None) -> Any:
    return value if placement is None else SequenceTensor(value, placement)
