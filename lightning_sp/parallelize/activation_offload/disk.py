"""Tensors in a file: written and read by one thread, in the order in which they are asked for.

The file has no name from its creation on, so nothing is left of it however the process ends.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lightning_sp.parallelize.activation_offload.store import Form, check_unchanged, flat_bytes

# Of one call: a kernel writes at most 2 GiB.
_MOST_BYTES = 2**30


class DiskStore:
    """A file of this rank; a class because its thread and its places live as long as it.

    Args:
        folder: where the file is; its disk's room is what can be stored.

    Attributes:
        num_bytes: the most that was in the file at once.
        failure: why a tensor could not be written, and stays in memory; None where all could.
        refuses: whether new tensors stay in memory.
        files: how many were made; a place is one of one file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_bytes = 0
        self.failure: OSError | None = None
        self.refuses = False
        self.files = 0
        self._file: IO[bytes] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # places, by their size
        self._end = self._num_placed = 0

    def put(self, tensor: Tensor) -> _InFile:
        """Begin to write a dense tensor."""
        if self._file is None or self._thread is None:
            self._file = tempfile.TemporaryFile(dir=self.folder, prefix="lightning_sp_activations_")  # noqa: SIM115, it outlives this call
            self.files += 1
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="activation_offload")
        return _InFile(self, tensor)

    def place(self, num_bytes: int) -> int:
        """Return where in the file so many bytes may be: from its beginning, where nothing is in it, so that other lengths take no more."""
        if not self._num_placed:
            self._free.clear()
            self._end = 0
        self._num_placed += 1
        if self._free[num_bytes]:
            return self._free[num_bytes].pop()
        place, self._end = self._end, self._end + num_bytes
        self.num_bytes = max(self.num_bytes, self._end)
        return place

    def vacate(self, place: int, num_bytes: int, file: int) -> None:
        """Let others use a place: what they write comes after what is still asked for. Nothing where the file is closed."""
        if file == self.files and self._file is not None:
            self._free[num_bytes].append(place)
            self._num_placed -= 1

    def submit(self, function: Any, *args: Any) -> Future[Any]:
        """Run a function in the thread, after all that was asked for before."""
        assert self._thread is not None, "the store is closed"
        return self._thread.submit(function, *args)

    def write(self, source: Tensor, place: int) -> None:
        """Write bytes (n,)."""
        left = memoryview(source.numpy())  # type: ignore[arg-type]
        while left:
            written = os.pwrite(self._number, left[:_MOST_BYTES], place)
            left, place = left[written:], place + written

    def read(self, target: Tensor, place: int) -> None:
        """Fill bytes (n,)."""
        left = memoryview(target.numpy())  # type: ignore[arg-type]
        while left:
            read = os.preadv(self._number, [left[:_MOST_BYTES]], place)
            if not read:
                raise OSError(f"the file of activations in {self.folder} ends at {place} bytes")
            left, place = left[read:], place + read

    @property
    def _number(self) -> int:
        assert self._file is not None, "the store is closed"
        return self._file.fileno()

    def close(self) -> None:
        """End the thread and let go of the file; another tensor makes both anew."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=True, cancel_futures=True)
        file, self._file = self._file, None
        if file is not None:
            file.close()
        self._free.clear()
        self._end = self._num_placed = self.num_bytes = 0
        self.failure, self.refuses = None, False


class _InFile:
    """One tensor of a `DiskStore`."""

    def __init__(self, store: DiskStore, tensor: Tensor) -> None:
        self._store, self._form, self._file = store, Form.of(tensor), store.files
        self._place = store.place(self._form.num_bytes)
        self._version = self._last_version = tensor._version
        # Until it is written; where it could not be, until it is released.
        self._source: Tensor | None = tensor
        self._read: Future[Tensor] | None = None
        self._written: Future[None] | None = None if store.refuses else store.submit(self._write)

    def _write(self) -> None:
        source = self._source
        assert source is not None
        try:
            self._store.write(flat_bytes(source), self._place)
        except OSError as error:  # a full disk: the step goes on, as without offload
            self._store.failure, self._store.refuses = error, True
        else:
            self._last_version, self._source = source._version, None

    def wait_until_away(self) -> None:
        if self._written is not None:
            self._written.result()

    def prefetch(self) -> None:
        if self._read is None and self._source is None:
            self._read = self._store.submit(self._fetch)

    def _fetch(self) -> Tensor:
        flat = torch.empty(self._form.num_bytes, dtype=torch.uint8)
        self._store.read(flat, self._place)
        return self._form.shaped(flat)

    def take(self) -> Tensor:
        source = self._source
        check_unchanged(self._last_version if source is None else source._version, self._version, self._form)
        if source is not None:
            return source
        self.prefetch()
        read, self._read = self._read, None
        assert read is not None
        return read.result()

    def release(self) -> None:
        self._store.vacate(self._place, self._form.num_bytes, self._file)
