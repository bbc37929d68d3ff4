"""Counts the forwards of the CPU's attention kernel: what is computed again in a backward shows there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from lightning_sp.attention.kernels.torch_flash import TorchCpuKernel


@contextlib.contextmanager
def kernel_calls() -> Iterator[list[None]]:
    """Give a list that grows by one with each call."""
    calls: list[None] = []
    forward = TorchCpuKernel.forward

    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return forward(*args, **kwargs)

    with patch.object(TorchCpuKernel, "forward", called):
        yield calls
