"""Megatron's token files, written document by document."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from types import TracebackType

import numpy as np

from lightning_sp.errors import SequenceParallelError
from lightning_sp.text.checked_file import BlockChecksums
from lightning_sp.text.indexed_dataset import (
    DTYPES,
    HEADER,
    MAGIC,
    MAXIMUM_SIZE,
    VERSION,
    Checksums,
    Tokens,
    token_file_paths,
)


class TokenFileWriter:
    """Write a token file document by document; it appears under its name only when complete.

    Use as a context manager. Both files grow under temporary names and are renamed on leaving, the .idx last; an
    exception leaves nothing behind, and an older file as it was.

    Args:
        path: The prefix, the .bin or the .idx.
        dtype: Of the stored ids; `tokenizer.token_dtype(vocab_size)` is Megatron's choice.
    """

    def __init__(self, path: str | Path, dtype: np.dtype[np.integer] | type[np.integer]) -> None:
        self.dtype = np.dtype(dtype)
        codes = {known: code for code, known in DTYPES.items() if known.kind in "iu"}
        if self.dtype not in codes:
            raise SequenceParallelError(f"dtype {self.dtype} cannot be stored; one of {[str(d) for d in codes]} can")
        self._code = codes[self.dtype]
        self._final = token_file_paths(path)
        self._temporary = tuple(p.with_name(f"{p.name}.{os.getpid()}.tmp") for p in self._final)
        self._sizes: list[int] = []
        self._blocks = BlockChecksums()

    @property
    def num_documents(self) -> int:
        """Documents written so far."""
        return len(self._sizes)

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return sum(self._sizes)

    @property
    def checksums(self) -> Checksums:
        """Of both files, by what was added so far."""
        return Checksums(index=zlib.crc32(self._index()), blocks=self._blocks.of_all())

    def __enter__(self) -> TokenFileWriter:
        """Open the temporary .bin."""
        self._final[0].parent.mkdir(parents=True, exist_ok=True)
        self._bin = self._temporary[0].open("wb")
        return self

    def add(self, tokens: Tokens) -> None:
        """Append one document.

        Raises:
            SequenceParallelError: When it is empty, too long for the format, or has ids that do not fit the dtype.
        """
        name = f"document {len(self._sizes)}"
        if not 0 < len(tokens) <= MAXIMUM_SIZE:
            raise SequenceParallelError(
                f"{name} has {len(tokens)} tokens; the format stores 1 to {MAXIMUM_SIZE} in one: skip or split it"
            )
        limits, low, high = np.iinfo(self.dtype), int(tokens.min()), int(tokens.max())
        if low < limits.min or high > limits.max:
            raise SequenceParallelError(
                f"{name} has ids from {low} to {high}, {self.dtype} holds {limits.min} to {limits.max}"
            )
        data = np.ascontiguousarray(tokens, dtype=self.dtype).tobytes()
        self._bin.write(data)
        self._blocks.add(data)
        self._sizes.append(len(tokens))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Complete both files and rename them, or remove them after an exception."""
        try:
            self._sync(self._bin)
            if kind is None:
                self._write_index()
                # Never an old index beside new tokens: who reads in between finds no file.
                self._final[1].unlink(missing_ok=True)
                for temporary, final in zip(self._temporary, self._final, strict=True):
                    os.replace(temporary, final)
        finally:
            for temporary in self._temporary:
                temporary.unlink(missing_ok=True)

    def _index(self) -> bytes:
        sizes = np.array(self._sizes, dtype="<i4")
        pointers = (np.cumsum(sizes, dtype=np.int64) - sizes) * self.dtype.itemsize
        header = HEADER.pack(MAGIC, VERSION, self._code, len(sizes), len(sizes) + 1)
        arrays = sizes, pointers.astype("<i8"), np.arange(len(sizes) + 1, dtype="<i8")
        return b"".join([header, *(array.tobytes() for array in arrays)])

    def _write_index(self) -> None:
        with self._temporary[1].open("wb") as file:
            file.write(self._index())
            self._sync(file)

    @staticmethod
    def _sync(file: object) -> None:
        file.flush()  # type: ignore[attr-defined]
        os.fsync(file.fileno())  # type: ignore[attr-defined]
        file.close()  # type: ignore[attr-defined]
