"""A name in an object store (s3://..., gs://...), through fsspec: of a path what a checkpoint's folder is read and written by.

An object store has no folders and no rename: a name that others begin with is a folder, and an object is there when it is whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fsspec.core import url_to_fs

from lightning_sp.errors import SequenceParallelError


@dataclass(frozen=True)
class ObjectStat:
    """Bytes of an object, and the store's time of its writing."""

    st_size: int
    st_mtime: float


class Address:
    """One name in a store. Listings are read anew: other ranks write beside this one.

    Args:
        address: with its protocol.

    Raises:
        SequenceParallelError: fsspec does not know the protocol, or lacks a package for it.
    """

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        try:
            found: Any = url_to_fs(self._address)
        except (ImportError, ValueError) as error:
            raise SequenceParallelError(
                f"address {address!r} cannot be opened by fsspec: {error}; install what it names, or give a path that all nodes see"
            ) from error
        self._files, self._key = found

    def __str__(self) -> str:
        return self._address

    def __truediv__(self, name: str) -> Address:
        return Address(f"{self._address}/{name}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def name(self) -> str:
        """The last part."""
        return self._address.rpartition("/")[2]

    @property
    def parent(self) -> Address:
        """What this lies in."""
        return Address(self._address.rpartition("/")[0])

    def exists(self) -> bool:
        """Return whether it is an object's name, or that of a folder."""
        self._files.invalidate_cache()
        return bool(self._files.exists(self._key))

    def is_file(self) -> bool:
        """Return whether it is an object."""
        self._files.invalidate_cache()
        return bool(self._files.isfile(self._key))

    def is_dir(self) -> bool:
        """Return whether there are objects below it."""
        self._files.invalidate_cache()
        return bool(self._files.isdir(self._key))

    def is_symlink(self) -> bool:
        """Return False: a store has none."""
        return False

    def iterdir(self) -> Iterator[Address]:
        """Yield what lies in it."""
        self._files.invalidate_cache()
        for each in self._files.ls(self._key, detail=False):
            name = each.rstrip("/").rpartition("/")[2]
            if name and name != self.name:
                yield self / name

    def objects(self) -> Iterator[Address]:
        """Yield the objects below it, at any depth."""
        self._files.invalidate_cache()
        for each in self._files.find(self._key) if self._files.exists(self._key) else ():
            yield Address(str(self._files.unstrip_protocol(each)))

    def stat(self) -> ObjectStat:
        """Return an object's bytes and time."""
        self._files.invalidate_cache()
        return ObjectStat(int(self._files.size(self._key)), self._files.modified(self._key).timestamp())

    def open(self, mode: str) -> IO[bytes]:
        """Open an object."""
        opened: IO[bytes] = self._files.open(self._key, mode)
        return opened

    def read_bytes(self) -> bytes:
        """Return an object's content."""
        with self.open("rb") as stream:
            return stream.read()

    def read_text(self) -> str:
        """Return an object's content as text."""
        return self.read_bytes().decode()

    def write_bytes(self, content: bytes) -> None:
        """Put an object in place, at one moment."""
        with self.open("wb") as stream:
            stream.write(content)

    def remove(self) -> None:
        """Remove it, and all below it."""
        self._files.invalidate_cache()
        if self._files.exists(self._key):
            self._files.rm(self._key, recursive=True)


Location = Path | Address
