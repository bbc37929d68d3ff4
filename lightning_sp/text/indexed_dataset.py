r"""Megatron's token files, byte for byte: a reader. `indexed_dataset_writer` writes them.

    x.idx   magic "MMIDIDX\0\0" | version <Q = 1 | dtype code <B | sequences n <Q | document marks d <Q
            | sizes int32[n] | pointers int64[n] (bytes into x.bin) | marks int64[d]: 0, end of document 0, ..., n
    x.bin   the tokens, one sequence after the other

A document is the sequences between two marks (one, as we write it). Files that do not agree with themselves are refused
with the numbers. Flipped bits are found by the checksums that `prepare` keeps beside them, and by nothing else: the
format has none. Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_sp.errors import SequenceParallelError
from lightning_sp.text.checked_file import CheckedFile

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name) for code, name in enumerate(("u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), start=1)
}
MAXIMUM_SIZE = 2**31 - 1
Tokens = NDArray[np.integer]


def token_file_paths(path: str | Path) -> tuple[Path, Path]:
    """Return the (.bin, .idx) paths for a prefix or for either of the two."""
    prefix = str(path)
    for suffix in (".bin", ".idx"):
        prefix = prefix.removesuffix(suffix)
    return Path(prefix + ".bin"), Path(prefix + ".idx")


@dataclass(frozen=True)
class Checksums:
    """What a token file was written as.

    Args:
        index: CRC-32 of the .idx.
        blocks: Of each block of the .bin, as `checked_file` cuts it.
    """

    index: int
    blocks: Sequence[int]


class TokenFile:
    """A token file, read by offset: a `corpus.Corpus`.

    Args:
        path: The prefix, the .bin or the .idx.
        names: Names of its documents; their numbers when None, for the format keeps no names.
        checksums: Of the files; None compares nothing.

    Raises:
        SequenceParallelError: When a file is missing, damaged or truncated, or does not belong to the other.
    """

    def __init__(
        self, path: str | Path, names: Sequence[str] | None = None, checksums: Checksums | None = None
    ) -> None:
        self.path = path
        self._checksums = checksums
        self._bin_path, self._idx_path = token_file_paths(path)
        for file in (self._idx_path, self._bin_path):
            if not file.is_file():
                raise SequenceParallelError(
                    f"{str(file)!r} does not exist: a token file is a .bin and an .idx of one name, written by "
                    "`lightning-sp prepare` or Megatron-LM"
                )
        self.dtype, sequence_sizes, marks = self._read_index()
        self.num_tokens = int(sequence_sizes.sum(dtype=np.int64))
        self._check_bin()
        ends = np.concatenate([[0], np.cumsum(sequence_sizes, dtype=np.int64)])
        self._starts: NDArray[np.int64] = ends[marks[:-1]]
        self.sizes: NDArray[np.int64] = ends[marks[1:]] - self._starts
        self.names: Sequence[str] = [str(i) for i in range(len(self.sizes))] if names is None else names
        if len(self.names) != len(self.sizes):
            raise SequenceParallelError(f"{len(self.names)} names were given for {len(self.sizes)} documents of {path}")
        blocks = None if checksums is None else checksums.blocks
        self._bin = CheckedFile(self._bin_path, self.num_tokens * self.dtype.itemsize, blocks)

    def __reduce__(self) -> tuple[type[TokenFile], tuple[str | Path, Sequence[str], Checksums | None]]:
        """Pickle as the path: a worker opens the file itself."""
        return TokenFile, (self.path, self.names, self._checksums)

    def read(self, document: int, start: int, stop: int) -> Tokens:
        """Return tokens [start, stop) of a document.

        Raises:
            SequenceParallelError: The file has become shorter, or is not as it was written.
        """
        first = int(self._starts[document])
        return self._read(first + start, first + min(stop, int(self.sizes[document])))

    def _read(self, start: int, stop: int) -> Tokens:
        return self._bin.read(start * self.dtype.itemsize, max(start, stop) * self.dtype.itemsize).view(self.dtype)

    def fingerprint(self) -> str:
        """Return a digest of the index and of the first and last MiB of tokens."""
        digest = hashlib.sha256(self._idx_path.read_bytes())
        edge = 2**20 // self.dtype.itemsize
        digest.update(self._read(0, min(edge, self.num_tokens)).tobytes())
        digest.update(self._read(max(0, self.num_tokens - edge), self.num_tokens).tobytes())
        return digest.hexdigest()[:32]

    def _refuse(self, file: Path, problem: str) -> SequenceParallelError:
        fix = "it is damaged, half-written or of another kind; write it again (`lightning-sp prepare`)"
        return SequenceParallelError(f"{str(file)!r} {problem}: {fix}")

    def _read_index(self) -> tuple[np.dtype[np.integer], NDArray[np.int32], NDArray[np.int64]]:
        path = self._idx_path
        index = np.fromfile(path, dtype=np.uint8)
        num_bytes, header = len(index), index[: HEADER.size].tobytes()
        if len(header) < HEADER.size:
            raise self._refuse(path, f"has {num_bytes} bytes, fewer than the {HEADER.size} of its header")
        magic, version, code, num_sequences, num_marks = HEADER.unpack(header)
        if magic != MAGIC:
            raise self._refuse(path, f"begins with {magic!r}, a token index with {MAGIC!r}")
        if version != VERSION:
            raise self._refuse(path, f"has version {version}, known is {VERSION}")
        if code not in DTYPES or DTYPES[code].kind not in "iu":
            known = {i: str(dtype) for i, dtype in DTYPES.items() if dtype.kind in "iu"}
            raise self._refuse(path, f"has dtype code {code}, token ids have one of {known}")
        expected = HEADER.size + num_sequences * (4 + 8) + num_marks * 8
        if num_bytes == expected + num_sequences > expected:
            raise SequenceParallelError(
                f"{str(path)!r} holds {num_sequences} sequence modes besides {num_sequences} sequences: it is "
                "Megatron's multimodal kind, which holds more than text; only text is read"
            )
        if num_bytes != expected:
            raise self._refuse(
                path, f"has {num_bytes} bytes, {num_sequences} sequences and {num_marks} document marks need {expected}"
            )
        if self._checksums is not None and zlib.crc32(index.data) != self._checksums.index:
            raise self._refuse(path, "has not the checksum that it was written with")
        sizes, pointers, marks = np.split(index[HEADER.size :], [num_sequences * 4, num_sequences * 12])
        return (
            DTYPES[code],
            self._checked_sizes(sizes.view("<i4"), pointers.view("<i8"), DTYPES[code].itemsize),
            self._checked_marks(marks.view("<i8"), num_sequences),
        )

    def _checked_sizes(self, sizes: NDArray[np.int32], pointers: NDArray[np.int64], itemsize: int) -> NDArray[np.int32]:
        if len(sizes) and int(sizes.min()) < 0:
            raise self._refuse(self._idx_path, f"gives sequence {int(sizes.argmin())} a size of {int(sizes.min())}")
        expected = (np.cumsum(sizes, dtype=np.int64) - sizes) * itemsize
        wrong = np.flatnonzero(pointers != expected)
        if len(wrong):
            i = int(wrong[0])
            raise self._refuse(
                self._idx_path,
                f"points sequence {i} to byte {int(pointers[i])}, the sizes before it end at {int(expected[i])}",
            )
        return sizes

    def _checked_marks(self, marks: NDArray[np.int64], num_sequences: int) -> NDArray[np.int64]:
        if not len(marks) or marks[0] != 0 or marks[-1] != num_sequences or bool((np.diff(marks) < 0).any()):
            shown = f"{marks[:3].tolist()} ... {marks[-3:].tolist()}"
            raise self._refuse(
                self._idx_path, f"has document marks {shown}, they must rise from 0 to its {num_sequences} sequences"
            )
        return marks

    def _check_bin(self) -> None:
        num_bytes, expected = self._bin_path.stat().st_size, self.num_tokens * self.dtype.itemsize
        if num_bytes != expected:
            raise self._refuse(
                self._bin_path,
                f"has {num_bytes} bytes, its index describes {self.num_tokens} tokens of {self.dtype} = {expected}",
            )
