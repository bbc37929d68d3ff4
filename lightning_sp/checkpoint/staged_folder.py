"""A checkpoint's folder as a copy in the host's memory, which is written while training goes on.

    main thread     DCP's plan, and a copy of what this rank is to write; the plain values as bytes
    a thread        write_part: this rank's file, and its checksum
    rank 0's        complete: .metadata, meta.pt, the manifest, and the folder's name

What is written is what `save` writes: the same plan and the same writer, later.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.utils._pytree import tree_leaves

from lightning_sp import comm
from lightning_sp.checkpoint.folders.folder import META, METADATA, checksum, write_manifest
from lightning_sp.checkpoint.folders.replace import put_in_place


@dataclass(frozen=True)
class WrittenPart:
    """What a rank has written.

    Args:
        results: DCP's, of its tensors.
        files: bytes and CRC-32 of each of its files.
    """

    results: list[WriteResult]
    files: dict[str, tuple[int, int]]


class StagedFolder:
    """One checkpoint, copied and not yet written.

    Args:
        tensors: as DCP saves them.
        plain: everything else.
        staging: where it is written.
        path: the name that it takes when it is whole.
        group: the world, on a backend for host objects.

    Communicates: DCP's plan.
    """

    def __init__(
        self, tensors: dict[str, Any], plain: dict[str, Any], staging: Path, path: Path, group: ProcessGroup | None
    ) -> None:
        self.path, self._staging = path, staging
        self._writer = _LaterWriter(staging)
        self._meta = b""
        if comm.rank_in(group or comm.world()) == 0:
            buffer = io.BytesIO()
            torch.save(plain, buffer)
            self._meta = buffer.getvalue()
        dcp_save(tensors, storage_writer=self._writer, process_group=group)

    def write_part(self) -> WrittenPart:
        """Write this rank's file, and let the copies go."""
        results = self._writer.write()
        prefix = f"__{dist.get_rank() if dist.is_initialized() else 0}_"
        files = {file.name: checksum(file) for file in self._staging.iterdir() if file.name.startswith(prefix)}
        return WrittenPart(results, files)

    def complete(self, parts: Sequence[WrittenPart]) -> None:
        """Make the folder whole: on rank 0, when every rank has written its part."""
        self._writer.write_metadata([each.results for each in parts])
        with (self._staging / META).open("wb") as stream:
            stream.write(self._meta)
            stream.flush()
            os.fsync(stream.fileno())
        files = {name: of for each in parts for name, of in each.files.items()}
        own = {name: checksum(self._staging / name) for name in (METADATA, META)}
        write_manifest(self._staging, {**files, **own})
        put_in_place(self._staging, self.path)


def staged_bytes(tensors: Any) -> int:
    """Return the bytes that this rank's copy needs at most: of whole tensors one rank writes each, and it may be this one."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tree_leaves(tensors)]
    return sum(each.numel() * each.element_size() for each in local if isinstance(each, Tensor))


class _LaterWriter(FileSystemWriter):
    """DCP's writer, which copies what it is to write, and writes when it is told to."""

    def __init__(self, staging: Path) -> None:
        super().__init__(staging)
        self._plan = SavePlan([])
        self._copies: dict[Any, Tensor | io.BytesIO] = {}
        self._global: Metadata | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy this rank's data."""
        self._plan = plan
        self._copies = {item.index: _copy(planner.resolve_data(item)) for item in plan.items}
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Metadata, results: Iterable[list[WriteResult]]) -> None:
        """Keep what rank 0 knows of all tensors; where they lie is not known yet."""
        self._global = metadata

    def write(self) -> list[WriteResult]:
        """Write the copies."""
        found: list[WriteResult] = super().write_data(self._plan, _Copies(self._copies)).wait()
        self._copies = {}
        return found

    def write_metadata(self, results: list[list[WriteResult]]) -> None:
        """Write the description of all tensors."""
        assert self._global is not None
        super().finish(self._global, results)


class _Copies(DefaultSavePlanner):
    """Gives DCP's writer the copies."""

    def __init__(self, copies: dict[Any, Tensor | io.BytesIO]) -> None:
        super().__init__()
        self._copies = copies

    def resolve_data(self, item: WriteItem) -> Tensor | io.BytesIO:
        """Return what is to be written."""
        return self._copies[item.index]


def _copy(value: Tensor | io.BytesIO) -> Tensor | io.BytesIO:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
