"""Buffers that data-parallel ranks write, each of its own rows, as DDP has them: rank 0's stand for all before the next step.

    rank 0    forward: running_mean of its rows  |  update  |  rank 0's  |  next forward
    rank 1    forward: running_mean of its rows  |  update  |  rank 0's  |  next forward

The preflight sees which a step moves, by their numbers: a kernel, or a write to `.data`, counts in no version. What it has not seen, and
versions show, is said in the message about each batch. Where no preflight has compared, all buffers are sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_sp import comm
from lightning_sp.comm import SameBatch
from lightning_sp.mesh import SequenceMesh
from lightning_sp.parameter_names import user_name

# What DDP leaves to each rank: names in the module that is handed to it.
_IGNORED = "_ddp_params_and_buffers_to_ignore"


class RankBuffers:
    """Makes buffers rank 0's where a rank has written to some; a class because it keeps what was there when they last were.

    They are those of a module whose sequences are not split, on data-parallel ranks; with any others nothing is done.
    """

    def __init__(self) -> None:
        self._root: nn.Module | None = None
        self._mesh: SequenceMesh | None = None
        self._known: dict[str, tuple[Tensor, int]] = {}
        self._due = True

    def follow(self, root: nn.Module, mesh: SequenceMesh) -> None:
        """Begin a run. The buffers of a module that is new are alike on all ranks; of one that has run, what was written since is known."""
        self._mesh = mesh if mesh.layout.size == 1 and mesh.data_parallel_size > 1 else None
        self._due = True
        if root is not self._root:
            self._root, self._known = root, _versions(root)

    @property
    def digest(self) -> int:
        """A number that tells which buffers this rank has written to, or replaced, since they were last alike: 0 for none."""
        return _digest(self._written())

    def share_after(self, told: SameBatch, moved: Set[str] | None, *, begins: bool, trains: bool) -> None:
        """Make them alike before a batch. Every rank must call it.

        Args:
            told: of the batch that is about to be run.
            moved: names of the buffers that a step is known to move, alike on all ranks; None where nothing is known.
            begins: whether it begins an optimizer step, or an evaluation after one: within a window each rank goes on with its own, as with DDP.
            trains: whether it is one of training.

        Communicates: as `_share`.
        """
        if self._mesh is None or not begins:
            return
        due, self._due = self._due or trains, trains
        if due and (moved is None or moved or told.writes_buffers):
            self._share(None if moved is None or not told.same_buffers else {*moved, *self._written()})

    def share_all(self) -> None:
        """Make them alike outside of a batch: a checkpoint has rank 0's. Every rank must call it. Communicates: as `_share`."""
        if self._mesh is not None:
            self._share(None)

    def _written(self) -> tuple[str, ...]:
        if self._mesh is None or self._root is None:
            return ()
        return tuple(name for name, now in _versions(self._root).items() if not self._is_known(name, *now))

    def _is_known(self, name: str, buffer: Tensor, version: int) -> bool:
        known = self._known.get(name)
        return known is not None and known[0] is buffer and known[1] == version

    def _share(self, names: Set[str] | None) -> None:
        """Give all data-parallel ranks the first one's buffers.

        Args:
            names: of those that are sent, the same on all ranks; None for all.

        Communicates: one broadcast for each dtype.
        """
        assert self._root is not None
        assert self._mesh is not None
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for name, buffer in whole_buffers(self._root).items():
            if names is None or name in names:
                by_dtype[buffer.dtype].append(buffer.detach())
        for buffers in by_dtype.values():
            flat = torch.cat([each.reshape(-1) for each in buffers])
            if flat.numel():
                comm.broadcast(flat.view(torch.uint8), self._mesh.data_group)
            begin = 0
            for each in buffers:
                each.copy_(flat[begin : begin + each.numel()].view(each.shape))
                begin += each.numel()
        self._known = _versions(self._root)


def _digest(names: Sequence[str]) -> int:
    return comm.digest_of(dict.fromkeys(names, 1)) | 1 if names else 0


def whole_buffers(root: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that each rank holds whole, but for those that DDP was told to leave alone."""
    ignored = set(getattr(root, _IGNORED, ()))
    return {
        name: buffer
        for name, buffer in root.named_buffers()
        if not isinstance(buffer, DTensor) and user_name(name) not in ignored
    }


def _versions(root: nn.Module) -> dict[str, tuple[Tensor, int]]:
    return {name: (each, -1 if each.is_inference() else each._version) for name, each in whole_buffers(root).items()}
