"""A batch's way to the device: all of its tensors, and what the step reads of it, as one copy that the host does not wait for."""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.devices import copies_on, is_accelerator


def to_device(batch: Any, info: SequenceInfo, device: torch.device, *, alone: bool) -> tuple[Any, SequenceInfo]:
    """Return a batch and what is known of it, with their tensors on a device; a tensor that stands in both goes once.

    Args:
        batch: this rank's part.
        info: what was sharded.
        device: of this rank.
        alone: the batch stays where it is: its user moves it.
    """
    if not is_accelerator(device):
        return batch, info
    found: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        return found.setdefault(id(tensor), tensor)

    if not alone:
        apply_to_collection(batch, Tensor, note)
    info.with_tensors(note)
    moved = dict(zip(found, copies_on([*found.values()], device), strict=True))
    info = info.with_tensors(lambda tensor: moved[id(tensor)])
    return batch if alone else apply_to_collection(batch, Tensor, lambda tensor: moved[id(tensor)]), info
