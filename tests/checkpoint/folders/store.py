"""A store of objects that all ranks of a machine see, as s3:// would be: `folder_store://<a folder of the machine>`."""

from __future__ import annotations

from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class FolderStore(LocalFileSystem):
    """Objects are files. A folder has no rename, as in a store."""

    protocol = "folder_store"

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(LocalFileSystem._strip_protocol(str(path).removeprefix("folder_store://")))

    def unstrip_protocol(self, name: str) -> str:
        return f"folder_store://{self._strip_protocol(name)}"

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        assert not self.isdir(path1), "a store of objects renames no folder"
        super().mv(path1, path2, **options)


fsspec.register_implementation("folder_store", FolderStore, clobber=True)
