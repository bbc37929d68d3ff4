"""Tensors of a device in the host's pinned memory: copied on streams of their own, beside what the device computes.

    forward     compute   | block 0 | block 1 | block 2 |            out      | x0 | x1 | x2 |
    backward    compute   | block 2 | block 1 | block 0 |            back  | x1 | x0 |

Read from CUDA's rules and counted on a simulated device; on a GPU its gradients were right, its overlap was not looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_sp.parallelize.activation_offload.store import Form, check_unchanged, flat_bytes


class PinnedHostStore:
    """Buffers of the host that are used again, for tensors of their size or less; a class because they stay, as the two streams do.

    Args:
        device: of the tensors.
        pins: whether its buffers are pinned: a device that is simulated pins none.
    """

    def __init__(self, device: torch.device, *, pins: bool) -> None:
        self.device, self.pins = device, pins
        self.runtime: Any = getattr(torch, device.type)
        self.out, self.back = self.runtime.Stream(device), self.runtime.Stream(device)
        # With what must have ended before another tensor is written to them.
        self._free: list[tuple[Tensor, Any]] = []

    def put(self, tensor: Tensor) -> _InHost:
        """Begin to copy a dense tensor of the device."""
        return _InHost(self, tensor)

    def buffer(self, num_bytes: int) -> tuple[Tensor, Any]:
        """Return at least so many pinned bytes, and the event of their last use, if there was one.

        One that is too small goes for one that is made: with steps of many lengths there are as many as tensors were away at once.
        """
        sizes = [buffer.numel() for buffer, _ in self._free]
        if fitting := [size for size in sizes if size >= num_bytes]:
            return self._free.pop(sizes.index(min(fitting)))
        if sizes:
            self._free.pop(sizes.index(max(sizes)))
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.pins), None

    def vacate(self, buffer: Tensor, last_use: Any) -> None:
        """Let other tensors use a buffer."""
        self._free.append((buffer, last_use))

    def close(self) -> None:
        """Let go of the buffers that no tensor uses."""
        self._free.clear()


class _InHost:
    """One tensor of a `PinnedHostStore`."""

    def __init__(self, store: PinnedHostStore, tensor: Tensor) -> None:
        self._store, self._form = store, Form.of(tensor)
        self._buffer, last_use = store.buffer(self._form.num_bytes)
        store.out.wait_stream(store.runtime.current_stream(store.device))  # what computes the tensor
        with store.runtime.stream(store.out):
            if last_use is not None:
                store.out.wait_event(last_use)
            self._buffer[: self._form.num_bytes].copy_(flat_bytes(tensor), non_blocking=True)
            self._away = store.out.record_event()
        self._last_use = self._away
        # The device's memory must not be another tensor's before the copy has read it.
        self._source: Tensor | None = tensor
        self._version = self._last_version = tensor._version
        self._arriving: tuple[Tensor, Any] | None = None

    def wait_until_away(self) -> None:
        """Let what is computed from now on wait for the copy, on the device: the host does not."""
        if self._source is not None:
            self._store.runtime.current_stream(self._store.device).wait_event(self._away)
            self._last_version, self._source = self._source._version, None

    def prefetch(self) -> None:
        if self._arriving is not None:
            return
        current = self._store.runtime.current_stream(self._store.device)
        # Of the computing stream, whose memory it is when it is freed; the copy waits for what that stream did with it before.
        flat = torch.empty(self._form.num_bytes, dtype=torch.uint8, device=self._store.device)
        self._store.back.wait_stream(current)
        with self._store.runtime.stream(self._store.back):
            self._store.back.wait_event(self._away)
            flat.copy_(self._buffer[: self._form.num_bytes], non_blocking=True)
            self._last_use = self._store.back.record_event()
        self._arriving = flat, self._last_use

    def take(self) -> Tensor:
        source = self._source
        check_unchanged(self._last_version if source is None else source._version, self._version, self._form)
        if source is not None:
            return source
        self.prefetch()
        assert self._arriving is not None
        (flat, arrived), self._arriving = self._arriving, None
        self._store.runtime.current_stream(self._store.device).wait_event(arrived)
        return self._form.shaped(flat)

    def release(self) -> None:
        if self._arriving is not None:  # never taken: its memory is freed when the copy has ended
            self._store.runtime.current_stream(self._store.device).wait_event(self._arriving[1])
        self.wait_until_away()
        self._store.vacate(self._buffer, self._last_use)
