"""A file's bytes by offset, each block compared with its CRC-32 when this process first reads of it.

    block 0      block 1      block 2      block 3 (short)
    |--- 2^18 ---|--- 2^18 ---|--- 2^18 ---|--|
              ^ read(start, stop) ^            reads blocks 0 and 1 whole the first time, the bytes asked for later

Not mapped into memory: a file that is cut short while it is mapped ends the process by SIGBUS, without a word. What changes in a block after
its first read is not seen.
"""

from __future__ import annotations

import os
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_sp.errors import SequenceParallelError

BLOCK_BYTES = 2**18


class BlockChecksums:
    """The CRC-32 of each block of a file that is being written; a class because the file grows by parts of any size."""

    def __init__(self) -> None:
        self._complete: list[int] = []
        self._crc = self._filled = 0

    def add(self, data: bytes) -> None:
        """Take what is appended to the file."""
        rest = memoryview(data)
        while rest:
            part, rest = rest[: BLOCK_BYTES - self._filled], rest[BLOCK_BYTES - self._filled :]
            self._crc, self._filled = zlib.crc32(part, self._crc), self._filled + len(part)
            if self._filled == BLOCK_BYTES:
                self._complete.append(self._crc)
                self._crc = self._filled = 0

    def of_all(self) -> list[int]:
        """Return those of the file so far, the last block's as it is."""
        return self._complete + [self._crc] * bool(self._filled)


class CheckedFile:
    """Reads a file by offset.

    Args:
        path: of the file.
        num_bytes: that it has.
        checksums: of its blocks; None where they are not known, and nothing is compared.

    Raises:
        SequenceParallelError: it cannot be opened, or the checksums are of a file of another size.
    """

    def __init__(self, path: Path, num_bytes: int, checksums: Sequence[int] | None = None) -> None:
        self.path, self.num_bytes = path, num_bytes
        num_blocks = -(-num_bytes // BLOCK_BYTES)
        if checksums is not None and len(checksums) != num_blocks:
            raise SequenceParallelError(
                f"{str(path)!r} has {num_bytes} bytes, {num_blocks} blocks; the .idx.json beside it has checksums of {len(checksums)}: prepare "
                "it again"
            )
        self._checksums = checksums
        self._is_checked = np.zeros(num_blocks, dtype=np.bool_)
        try:
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise SequenceParallelError(f"{str(path)!r} cannot be opened: {error}") from error
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return bytes [start, stop).

        Raises:
            SequenceParallelError: the file has become shorter, cannot be read, or a block is not as it was written.
        """
        blocks = slice(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))
        if self._checksums is None or bool(self._is_checked[blocks].all()):
            return self._read(start, stop)
        first = blocks.start * BLOCK_BYTES
        data = self._read(first, min(blocks.stop * BLOCK_BYTES, self.num_bytes))
        for block in range(blocks.start, blocks.stop):
            begin = block * BLOCK_BYTES
            if zlib.crc32(data.data[begin - first : begin - first + BLOCK_BYTES]) != self._checksums[block]:
                raise SequenceParallelError(
                    f"{str(self.path)!r} is damaged: bytes {begin} to {min(begin + BLOCK_BYTES, self.num_bytes)} have not the checksum they "
                    "were written with; prepare it again (`lightning-sp prepare`), or take a copy"
                )
        self._is_checked[blocks] = True
        return data[start - first : stop - first]

    def _read(self, start: int, stop: int) -> NDArray[np.uint8]:
        data = np.empty(stop - start, dtype=np.uint8)
        view, done = data.data, 0
        try:
            while done < len(data):
                num = os.preadv(self._descriptor, [view[done:]], start + done)
                if num == 0:
                    break
                done += num
        except OSError as error:
            raise SequenceParallelError(f"{str(self.path)!r} cannot be read at byte {start + done}: {error}") from error
        if done < len(data):
            raise SequenceParallelError(
                f"{str(self.path)!r} ends at byte {start + done}, it had {self.num_bytes} when it was opened: something has cut it short while "
                "the run reads it; write it under another name, and rename it when it is complete"
            )
        return data
