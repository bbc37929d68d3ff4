"""The process groups each stage needs, as one value.

    world = dp x ring x ulysses x tp       attention's mesh; Ulysses on faster links than ring (USP, arXiv:2405.07719, section 4), and both
                                           on faster ones than dp: the ranks of a sequence are neighbours, those of an all-to-all too
    world = replicate x shard              FSDP2's own mesh over the same rank order: shard_size may be below, equal to or above sp; its groups
                                           are its own, so that no gather waits behind a hop or an exchange of the attention's

The mesh owns groups and coordinates; it knows nothing of batches or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_sp.comm.collectives import gather_objects
from lightning_sp.comm.cpu.shared_memory import arena_of, connect
from lightning_sp.comm.groups import cached_per_world, group_name, group_of, make_group, set_world_timeout
from lightning_sp.comm.point_to_point import num_passes
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout
from lightning_sp.nodes import ring_blocks, ulysses_blocks

DATA, SEQUENCE, TENSOR = "data_parallel", "sequence_parallel", "tensor_parallel"


def build_device_mesh(device_type: str, *, data_parallel_size: int, sequence_parallel_size: int) -> DeviceMesh:
    """Build the mesh that exists before the model is known: data_parallel x sequence_parallel x tensor_parallel (size 1).

    Lightning's sampler reads its axis ``data_parallel``. Communicates: group creation on every rank, once for equal sizes.
    """
    return _device_mesh(device_type, (data_parallel_size, sequence_parallel_size, 1), (DATA, SEQUENCE, TENSOR))


def build_fsdp_mesh(device_type: str, *, world_size: int, shard_size: int) -> DeviceMesh:
    """Build FSDP2's mesh: one axis when everything is sharded, else replicate x shard (hybrid sharding).

    Its groups are no one else's, also where another has the same ranks: on NCCL a group is a communicator, and what is posted on one waits
    for what was posted before.

    Communicates: group creation on every rank, once for equal sizes. On NCCL each group makes its communicator in its first collective.
    """
    return _fsdp_mesh(device_type, world_size, shard_size)


@cached_per_world
def _fsdp_mesh(device_type: str, world_size: int, shard_size: int) -> DeviceMesh:
    # Not init_device_mesh: for an axis of all ranks it takes the world's group.
    rows = torch.arange(world_size).view(-1, shard_size)
    shard = make_group(_blocks(rows), "fsdp_shard")
    if shard_size == world_size:
        return DeviceMesh.from_group(shard, device_type, mesh_dim_names=("dp_shard",))
    groups = [make_group(_blocks(rows.t()), "fsdp_replicate"), shard]
    return DeviceMesh.from_group(groups, device_type, mesh=rows, mesh_dim_names=("dp_replicate", "dp_shard"))


def _blocks(ranks: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in ranks.tolist())


@cached_per_world
def _device_mesh(device_type: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> DeviceMesh:
    """Equal meshes of one world are one: a process group is a resource of the process."""
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=axes)
    for group in mesh.get_all_groups():
        set_world_timeout(group)
    return mesh


@dataclass(frozen=True)
class SequenceMesh:
    """The attention's mesh dp x ring x ulysses x tp, and this rank's coordinates in it.

    Args:
        base: the mesh data_parallel x sequence_parallel x tensor_parallel, whose second axis is ring x ulysses.
        layout: how that axis is split.
        ring_group: the group that passes keys and values on; None for a ring of one.
        ulysses_group: the group that exchanges heads for tokens; None for one rank.
        no_shared_memory: why ranks of a ring cannot read each other's memory, equal on all ranks of the world; empty if all can.
    """

    base: DeviceMesh
    layout: SequenceLayout
    ring_group: ProcessGroup | None
    ulysses_group: ProcessGroup | None
    no_shared_memory: str = ""

    @classmethod
    def build(cls, base: DeviceMesh, *, ring_size: int, ulysses_size: int) -> SequenceMesh:
        """Split the sequence axis of `base` (see `build_device_mesh`) into ring x ulysses.

        Communicates: group creation and what `shared_memory.connect` needs on every rank, once for equal sizes; one all_gather of reasons.
        """
        size = base[SEQUENCE].size()
        assert ring_size * ulysses_size == size
        assert base[TENSOR].size() == 1
        ring = group_of(ring_blocks(base.size(), size, ulysses_size))
        no_shared_memory = "" if ring is None else _share_memory(base, ring)
        neighbours = group_of(ulysses_blocks(base.size(), ulysses_size))
        return cls(base, SequenceLayout(ring_size, ulysses_size), ring, neighbours, no_shared_memory)

    @property
    def shares_memory(self) -> bool:
        """Whether there is a ring, and its ranks can read each other's memory."""
        return self.ring_group is not None and not self.no_shared_memory

    @property
    def num_ring_passes(self) -> int:
        """How many passes of its ring this rank has begun: equal on all ranks of a sequence."""
        arena = arena_of(group_name(self.ring_group))
        return num_passes(self.ring_group) + (arena.turn if arena is not None else 0)

    @property
    def sequence_group(self) -> ProcessGroup:
        """The ring x ulysses ranks that share one sequence."""
        return self.base.get_group(SEQUENCE)

    @property
    def data_group(self) -> ProcessGroup:
        """The ranks with the same tokens of different samples."""
        return self.base.get_group(DATA)

    @property
    def sequence_rank(self) -> int:
        """This rank's number among those that share its sequence; Ulysses is the faster axis."""
        return int(self.base.get_local_rank(SEQUENCE))

    @property
    def data_parallel_rank(self) -> int:
        """Which samples this rank's group reads."""
        return int(self.base.get_local_rank(DATA))

    @property
    def data_parallel_size(self) -> int:
        """How many groups read different samples."""
        return int(self.base[DATA].size())

    def describe(self) -> str:
        """Return the degrees in one line."""
        layout = self.layout
        return f"dp {self.data_parallel_size} x ring {layout.ring_size} x ulysses {layout.ulysses_size}"


def check_ring_transport(name: str, mesh: SequenceMesh | None) -> None:
    """Refuse a transport that the ranks cannot have; all ranks together, without communication.

    Raises:
        SequenceParallelError: with the reason and the rank.
    """
    if name == "shared_memory" and mesh is not None and mesh.no_shared_memory:
        raise SequenceParallelError(
            f"ring_transport='shared_memory': {mesh.no_shared_memory}; it is for CPU ranks of one machine; use 'network', or 'auto'"
        )


def _share_memory(base: DeviceMesh, ring: ProcessGroup) -> str:
    """Let the ranks of every ring map each other's memory; return why some cannot, equal on all ranks of the world."""
    if base.device_type != "cpu":
        return f"the ranks compute on {base.device_type}"
    return next((reason for reason in gather_objects(connect(ring)) if reason), "")
