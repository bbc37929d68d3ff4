"""Where tensors are between forward and backward: what a disk and a host's pinned memory have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Stored(Protocol):
    """One tensor on its way out, away, or on its way back."""

    def wait_until_away(self) -> None:
        """Let go of the tensor's own memory, when what is stored no longer needs it."""

    def prefetch(self) -> None:
        """Begin to bring it back; nothing where that has begun."""

    def take(self) -> Tensor:
        """Return it, with the strides that it had, and keep no reference to it. It can be taken again.

        Raises:
            RuntimeError: it was written to before it was away, as torch's own of a saved tensor.
        """

    def release(self) -> None:
        """Forget it: its place may be used for another."""


class Store(Protocol):
    """Keeps tensors."""

    def put(self, tensor: Tensor) -> Stored:
        """Begin to take a dense tensor away."""

    def close(self) -> None:
        """Let go of everything."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a dense tensor lies in its memory.

    Args:
        shape: of it.
        stride: of it, in elements.
        dtype: of it.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """Return that of a tensor."""
        return cls(shape=tensor.shape, stride=tensor.stride(), dtype=tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of it."""
        return self.shape.numel() * self.dtype.itemsize

    def shaped(self, flat: Tensor) -> Tensor:
        """Return bytes (n,) as the tensor."""
        return flat.view(self.dtype).as_strided(self.shape, self.stride)


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill its memory, each once."""
    return tensor.layout == torch.strided and torch.ops.aten.is_non_overlapping_and_dense(tensor)


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a dense tensor's memory as bytes (n,), without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def check_unchanged(now: int, before: int, form: Form) -> None:
    """Refuse a tensor that was written to after a graph has saved it, as torch does where no hook saves it.

    Args:
        now: its version.
        before: its version when it was saved.
        form: of it.

    Raises:
        RuntimeError: the two differ.
    """
    if now != before:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: the input {tuple(form.shape)} of "
            f"a checkpointed block is at version {now}, expected version {before}"
        )
