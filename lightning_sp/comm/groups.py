"""Process groups: by name, of a partition of the world, shared where equal, with the world's time limit."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as _c10d

from lightning_sp.nodes import sample_blocks, token_blocks, ulysses_blocks

_P = ParamSpec("_P")
_T = TypeVar("_T")


def group_by_name(name: str) -> ProcessGroup | None:
    """Return the process group of that name, None for the empty name (an axis of size 1)."""
    if not name:
        return None
    group: ProcessGroup = _c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type,unused-ignore]
    return group


def group_name(group: ProcessGroup | None) -> str:
    """Return the name under which `group_by_name` finds a group; empty for a group of one rank, whose steps vanish."""
    return "" if group is None or dist.get_world_size(group) == 1 else str(group.group_name)


def group_of(blocks: tuple[tuple[int, ...], ...]) -> ProcessGroup | None:
    """Return this rank's group of a partition of the world into blocks of ranks; None for blocks of one rank.

    Every rank must call it with the same blocks. Equal partitions share their groups. One block of all ranks is the world with gloo alone; on
    a device it is a group of its own, whose messages queue with no other ones.
    """
    if len(blocks[0]) == 1:
        return None
    if len(blocks) == 1 and len(blocks[0]) == dist.get_world_size() and dist.get_backend() == "gloo":
        return dist.group.WORLD
    return _new_groups(blocks)


def cached_per_world(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Cache a function's values by its arguments until the world is destroyed: process groups are a resource, their threads wake the process."""
    worlds: dict[weakref.ref[ProcessGroup], dict[Any, _T]] = {}

    @wraps(function)
    def cached(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        world = dist.group.WORLD
        if world is None or kwargs:
            return function(*args, **kwargs)
        key = weakref.ref(world)
        if key not in worlds:
            worlds[key] = {}
            when_destroyed(world, partial(worlds.pop, key, None))
        if args not in worlds[key]:
            worlds[key][args] = function(*args, **kwargs)
        return worlds[key][args]

    return cached


@cached_per_world
def _new_groups(blocks: tuple[tuple[int, ...], ...]) -> ProcessGroup:
    return make_group(blocks, "attention")


def make_group(blocks: tuple[tuple[int, ...], ...], description: str) -> ProcessGroup:
    """Make the groups of a partition of the world into blocks of ranks and return this rank's, which it shares with no other caller.

    Every rank must call it with the same blocks.

    Args:
        blocks: all ranks of the world, each once; one block of the whole world is a group of its own too.
        description: of what it is for, in NCCL's records.
    """
    own: ProcessGroup | None = None
    timeout = timedelta(seconds=timeout_s())
    for ranks in blocks:
        # From the beginning: what is set later counts for gloo's collectives, and not for its messages.
        group = dist.new_group(list(ranks), timeout=timeout, group_desc=description)
        if dist.get_rank() in ranks:
            own = group
    assert own is not None
    return own


@dataclass(frozen=True)
class HostGroups:
    """This rank's groups for values on the host, so that no step waits for its device.

    Args:
        world: all ranks; None is torch's default group.
        sequence: the ranks that share this rank's sequence.
        samples: the ranks that read this rank's samples: those of a sequence, with those that split the weights of each.
        tokens: the ranks that together hold each token of the global batch once; None is the world.
    """

    world: ProcessGroup | None
    sequence: ProcessGroup
    samples: ProcessGroup
    tokens: ProcessGroup | None = None


def host_groups(sequence: ProcessGroup, timeout: timedelta, tensor_parallel_size: int = 1) -> HostGroups:
    """Return the device's own groups where those take values on the host, else new ones. Every rank must call it.

    Args:
        sequence: this rank's block of a partition of the world, on the device's backend: neighbours, but for the ranks that split their weights.
        timeout: of the new groups' collectives.
        tensor_parallel_size: how many neighbours split the weights of each layer.
    """
    world_size, size = dist.get_world_size(), dist.get_world_size(sequence)
    on_host = takes_host_tensors(sequence)
    world = None if on_host else dist.new_group(backend="gloo", timeout=timeout)
    make = partial(_host_group, timeout=timeout)
    own = sequence if on_host else make(ulysses_blocks(world_size, size, tensor_parallel_size))
    if tensor_parallel_size == 1:
        return HostGroups(world, own, own)
    samples = make(sample_blocks(world_size, size, tensor_parallel_size))
    return HostGroups(world, own, samples, make(token_blocks(world_size, tensor_parallel_size)))


def _host_group(blocks: tuple[tuple[int, ...], ...], *, timeout: timedelta) -> ProcessGroup:
    """Make the groups of a partition of the world, on a backend for values on the host, and return this rank's."""
    own: ProcessGroup | None = None
    for ranks in blocks:
        group = dist.new_group(list(ranks), backend="gloo", timeout=timeout)
        if dist.get_rank() in ranks:
            own = group
    assert own is not None
    return own


def is_registered(group: ProcessGroup) -> bool:
    """Return whether a group still exists: `destroy_process_group` ends it, whoever has a reference."""
    return group in _c10d._world.pg_map  # type: ignore[attr-defined,unused-ignore]


def when_destroyed(group: ProcessGroup, function: Callable[[], object]) -> None:
    """Call a function when `destroy_process_group` has ended a group.

    torch has no hook for that. Only its table of groups references a group's store, so the store's end is that of the group.
    """
    weakref.finalize(_c10d._world.pg_map[group][1], function).atexit = False  # type: ignore[attr-defined,unused-ignore]


def timeout_s() -> float:
    """Return the time limit of the world's collectives."""
    world: Any = dist.group.WORLD
    options = [world._get_backend(each).options for each in world._device_types]
    # A backend of one's own may have none.
    limits = [each._timeout for each in options if each is not None] or [_c10d.default_pg_timeout]
    return min(float(each.total_seconds()) for each in limits)


@cached_per_world
def _timeout_owners() -> set[str]:
    """Return who sets the time limits of the world, for as long as it lives."""
    return set()


def own_timeouts() -> None:
    """Say that this package has made the world, so that its time limits are this package's."""
    _timeout_owners().add(__name__)


def has_own_timeouts() -> bool:
    """Return whether the world's time limits are this package's."""
    return bool(_timeout_owners())


def set_timeouts(timeout: timedelta) -> None:
    """Give every group of this rank, and the store that the ranks met in, another time limit; nothing in a world that others made.

    Every rank should call it at the same place. Without communication: a wait in progress keeps the limit that it began with.
    """
    if not _timeout_owners():
        return
    # torch has no public name for it: a limit is otherwise given when a group is made, and groups cannot be made anew between a model's setup
    # and its first step, for FSDP's parameters and meshes refer to them.
    for group in list(_c10d._world.pg_map):  # type: ignore[attr-defined,unused-ignore]
        _c10d._set_pg_timeout(timeout, group)
    _c10d._get_default_store().set_timeout(timeout)


def set_world_timeout(group: ProcessGroup) -> None:
    """Give a group's collectives the time limit of the world: torch gives each new one its own default of 10 or 30 minutes."""
    _c10d._set_pg_timeout(timedelta(seconds=timeout_s()), group)


def wait_for(message: dist.Work, group: ProcessGroup) -> None:
    """Wait for a message between two ranks, at most as long as the world's limit says.

    gloo's messages otherwise keep the limit that their group was made with, whatever it has been given since. NCCL's would stop the host.
    """
    if is_gloo_on_cpu(group):
        message.wait(timedelta(seconds=timeout_s()))
    else:
        message.wait()


def world() -> ProcessGroup | None:
    """Return the group of all ranks, None without processes."""
    return dist.group.WORLD if dist.is_initialized() else None


def size_of(group: ProcessGroup | None) -> int:
    """Return the number of ranks of a group, 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: ProcessGroup | None) -> int:
    """Return this rank's number in a group, 0 for None."""
    return 0 if group is None else dist.get_rank(group)


@torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
def takes_host_tensors(group: ProcessGroup) -> bool:
    """Return whether a group moves tensors of the host: NCCL's and others for one kind of device ("smddp") do not."""
    return torch.device("cpu") in group._device_types


def is_gloo_on_cpu(group: ProcessGroup) -> bool:
    """Return whether a group moves host tensors by gloo."""
    if (known := _by_gloo.get(group)) is None:
        cpu = torch.device("cpu")
        known = _by_gloo[group] = takes_host_tensors(group) and group._get_backend(cpu).name() == "gloo"
    return known


_by_gloo: weakref.WeakKeyDictionary[ProcessGroup, bool] = weakref.WeakKeyDictionary()
