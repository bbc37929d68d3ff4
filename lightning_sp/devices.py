"""Devices that compute while the host goes on, CUDA's and others: a value read there makes the host wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Where each tensor begins in a buffer of several: what every dtype can be read at.
_ALIGNMENT = 16


def is_accelerator(device: torch.device) -> bool:
    """Return whether the host goes on while a device computes."""
    return device.type != "cpu"


def makes_host_wait(tensor: Tensor) -> bool:
    """Return whether the host would wait for a tensor's values."""
    return is_accelerator(tensor.device)


def copies_on(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors on a device. To an accelerator those of the host go as views of one copy, for which the host does not wait.

    From pinned memory where that is CUDA. What is more than numbers goes by itself: a subclass, a sparse tensor, one with a graph.
    """
    if not is_accelerator(device):
        return [each.to(device) for each in tensors]
    starts: dict[int, int] = {}
    size = 0
    for index, each in enumerate(tensors):
        if (
            each.device.type == "cpu"
            and type(each) is Tensor
            and each.layout == torch.strided
            and not each.requires_grad
        ):
            starts[index] = size
            size += -(-each.numel() * each.element_size() // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for index, start in starts.items():
        _view(buffer, start, tensors[index]).copy_(tensors[index])
    copied = buffer.to(device, non_blocking=True)
    return [
        _view(copied, starts[index], each) if index in starts else each.to(device, non_blocking=True)
        for index, each in enumerate(tensors)
    ]


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    end = start + like.numel() * like.element_size()
    return buffer[start:end].view(like.dtype).view(like.shape)


def runtime(device: torch.device) -> Any:
    """Return an accelerator's module of torch: its events, its streams, its random numbers."""
    return torch.get_device_module(device)
