"""Which inputs of checkpointed blocks leave, and when they come back: at most `horizon` of them are in memory.

    forward     x0 computed -> leaves,   x1 -> leaves,   x2 -> leaves,   x3 -> leaves         each as its block ends
    backward    x3 back, x2 on its way;  x2 back, x1 on its way;  ...                         horizon 2

What the recomputation of a block reads is what its forward read, bit for bit. A non-reentrant checkpoint saves its inputs as autograd saves
tensors, so torch's hooks of saved tensors around it get them and nothing else. What is no activation stays: tensors without a gradient (masks,
positions), and what several blocks share, for it is in memory anyway.
Source: SageMaker's `sm_activation_offloading` and `activation_loading_horizon`.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_sp import comm
from lightning_sp.config import MemoryOptions
from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.module_boundary import local_parts, shown_again
from lightning_sp.parallelize.activation_offload.disk import DiskStore
from lightning_sp.parallelize.activation_offload.pinned_host import PinnedHostStore
from lightning_sp.parallelize.activation_offload.store import Form, Store, Stored, check_unchanged, is_dense
from lightning_sp.parallelize.compilation import compiled_modules

_ATTRIBUTE = "_lightning_sp_activation_offload"


def offload_activations(
    root: nn.Module, options: MemoryOptions, device: torch.device, blocks: Sequence[nn.Module]
) -> ActivationOffload | None:
    """Return what takes the inputs of a model's blocks away, None where the options ask for nothing. Every rank must call it.

    Args:
        root: the model.
        options: the tier, the horizon and the folder. By `activation_offload="auto"` a policy switches it on and off, and it begins off.
        device: of the activations.
        blocks: that are checkpointed.

    Raises:
        SequenceParallelError: a block is compiled, or a rank cannot write to its folder.
    """
    tier, waits = options.fixed_offload, options.activation_offload == "auto"
    if waits:
        tier = "host" if device.type == "cuda" else "disk" if options.offload_folder is not None else "none"
    if tier == "none":
        return None
    compiled = {part for each in compiled_modules(root) for part in each.modules()}
    if found := [each for each in blocks if each in compiled or not compiled.isdisjoint(each.modules())]:
        raise SequenceParallelError(
            f"activation_offload={options.activation_offload!r} with {len(found)} of {len(blocks)} blocks compiled: torch.compile decides in "
            "its own graph what is saved for the backward; leave torch.compile out, or activation_offload='none'"
        )
    store: Store
    if tier == "disk":
        folder = Path(options.offload_folder or tempfile.gettempdir())
        comm.agree(_why_not_written(folder))
        store = DiskStore(folder)
    else:
        store = PinnedHostStore(device, pins=device.type == "cuda")
    offload = ActivationOffload(store, options.activation_loading_horizon, len(blocks), tier=tier, waits=waits)
    setattr(root, _ATTRIBUTE, offload)
    return offload


def activation_offload(root: nn.Module) -> ActivationOffload | None:
    """Return that of a model, None where it has none."""
    found: ActivationOffload | None = vars(root).get(_ATTRIBUTE)
    return found


def _why_not_written(folder: Path) -> str | None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
    except OSError as error:
        return (
            f"activation_offload='disk' cannot write to offload_folder={os.fspath(folder)!r} on {socket.gethostname()}: {error}; name a "
            "folder on a local disk that each rank may write to"
        )
    return None


@dataclass(frozen=True, kw_only=True)
class _Room:
    """What a rank needs of which disk."""

    host: str
    disk: int
    folder: str
    needed_bytes: int
    free_bytes: int


class ActivationOffload:
    """The inputs that are away or on their way; a class because a backward reads what a forward has put.

    Args:
        store: where they go.
        horizon: how many may be in memory.
        num_blocks: whose inputs leave in a forward.
        tier: what the store is: "host" or "disk".
        waits: whether a checkpoint policy switches it; else it is on.

    Attributes:
        is_on: whether inputs leave in the next forward.
    """

    def __init__(self, store: Store, horizon: int, num_blocks: int, *, tier: str = "disk", waits: bool = False) -> None:
        self._store, self.horizon, self._num_blocks = store, horizon, num_blocks
        self.tier, self.waits, self.is_on = tier, waits, not waits
        # Of the disk, before anything was written, and what a forward needs of it.
        self._free_bytes = self._needed_bytes = 0
        self._told = False  # that the disk is full
        # As long as a graph holds them.
        self._saved: weakref.WeakValueDictionary[int, _Saved] = weakref.WeakValueDictionary()
        self._next = 0
        self._leaving: deque[Stored] = deque()
        self._given: dict[int, StorageWeakRef] = {}

    def run(
        self, recomputed: Callable[..., Any], forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a block under a checkpoint whose inputs leave.

        Args:
            recomputed: the non-reentrant checkpoint of a function of positional arguments.
            forward: the block's.
            args: of it.
            kwargs: of it.
        """
        leaves, spec = tree_flatten((args, kwargs))
        parts, placements = local_parts(leaves)

        def run(*parts: Any) -> Any:
            args, kwargs = tree_unflatten(shown_again(parts, placements), spec)
            return forward(*args, **kwargs)

        with saved_tensors_hooks(self._pack, self._unpack):
            return recomputed(run, *parts)

    def check_room(self, group: ProcessGroup | None) -> None:
        """Compare what a forward needs with the room that there was, on all ranks. Every rank must call it.

        Communicates: an all_gather of small objects on the host, with files alone.

        Raises:
            SequenceParallelError: the disk of a node is smaller than what its ranks need.
        """
        if not self.is_on or not isinstance(self._store, DiskStore):
            return
        folder = self._store.folder
        own = _Room(
            host=socket.gethostname(),
            disk=folder.stat().st_dev,
            folder=os.fspath(folder),
            needed_bytes=max(self._needed_bytes, self._store.num_bytes),
            free_bytes=self._free_bytes,
        )
        by_disk: dict[tuple[str, int], list[_Room]] = {}
        for each in comm.gather_objects(own, group):
            by_disk.setdefault((each.host, each.disk), []).append(each)
        for (host, _), rooms in by_disk.items():
            # Who looks later sees what the others have written.
            total, free = sum(each.needed_bytes for each in rooms), max(each.free_bytes for each in rooms)
            if total > free:
                raise SequenceParallelError(
                    f"activation_offload='disk': {len(rooms)} ranks of {host} need {total / 2**20:.1f} MiB for the inputs of "
                    f"{self._num_blocks} blocks, and {rooms[0].folder} has {free / 2**20:.1f} MiB; name a larger disk (offload_folder), use "
                    "more ranks for a sequence, or leave the activations in memory (activation_offload='none')"
                )
        self._store.refuses = self._store.failure is not None

    def close(self) -> None:
        """Let go of the file or the buffers; the next forward makes them anew."""
        self._leaving.clear()
        self._given.clear()
        self._store.close()
        self._free_bytes = self._needed_bytes = 0
        self._told = False

    # ---- one tensor

    def _pack(self, tensor: Tensor) -> Any:
        # torch 2.11 saves a tensor of no element of its own, too.
        if not (tensor.requires_grad and tensor.is_floating_point() and tensor.numel() and is_dense(tensor)):
            return tensor
        if not self._is_first_use(tensor):
            return _Kept(tensor)
        self._look_at_disk(tensor)
        stored = self._store.put(tensor.detach())
        saved = _Saved(stored, self._next)
        self._saved[self._next] = saved
        self._next += 1
        self._leaving.append(stored)
        while len(self._leaving) > self.horizon - 1:  # with the input of the block that runs
            self._leaving.popleft().wait_until_away()
        return saved

    def _is_first_use(self, tensor: Tensor) -> bool:
        """Return whether no other block has been given the tensor's memory, as long as that is alive."""
        self._given = {key: each for key, each in self._given.items() if not each.expired()}  # type: ignore[no-untyped-call]
        storage = tensor.untyped_storage()
        if storage._cdata in self._given:
            return False
        self._given[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return True

    def _look_at_disk(self, tensor: Tensor) -> None:
        """Write nothing more where an input shows that the disk is too small: the ranks refuse it when the forward has ended."""
        if not isinstance(self._store, DiskStore):
            return
        if not self._free_bytes:
            self._free_bytes = shutil.disk_usage(self._store.folder).free
        self._needed_bytes = max(self._needed_bytes, tensor.numel() * tensor.element_size() * self._num_blocks)
        self._store.refuses |= self._needed_bytes > self._free_bytes
        if (failure := self._store.failure) is not None and not self._told:
            self._told = True
            rank_zero_warn(
                f"activation_offload='disk': {failure}; the inputs of further blocks stay in memory, and the run goes on"
            )

    def _unpack(self, saved: Any) -> Any:
        if isinstance(saved, _Kept):
            return saved.take()
        if not isinstance(saved, _Saved):
            return saved
        tensor = saved.take()
        for each in self._before(saved.number):
            each.stored.prefetch()
        return tensor

    def _before(self, number: int) -> list[_Saved]:
        """Return what the backward needs next, as many as the horizon leaves."""
        waiting = [each for each in list(self._saved.values()) if each.number < number and not each.is_taken]
        return sorted(waiting, key=lambda each: -each.number)[: self.horizon - 1]


class _Kept:
    """A tensor that stays where it is, and must not change: torch looks after that where no hook is."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    def take(self) -> Tensor:
        check_unchanged(self._tensor._version, self._version, Form.of(self._tensor))
        return self._tensor


class _Saved:
    """What a graph holds in a tensor's place: with it the tensor goes."""

    def __init__(self, stored: Stored, number: int) -> None:
        self.stored, self.number, self.is_taken = stored, number, False
        weakref.finalize(self, stored.release).atexit = False

    def take(self) -> Tensor:
        self.is_taken = True
        return self.stored.take()
