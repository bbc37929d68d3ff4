"""The process groups each stage needs, as one value.

    world = dp x ring x ulysses x tp       attention's mesh; Ulysses on faster links than ring (USP, arXiv:2405.07719, section 4), and both
                                           on faster ones than dp: the ranks of a sequence are neighbours, those of an all-to-all too
    world = replicate x shard x tp         FSDP2's own mesh over the same rank order: shard_size may be below, equal to or above sp; its groups
                                           are its own, so that no gather waits behind a hop or an exchange of the attention's

The mesh owns groups and coordinates; it knows nothing of batches or models.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_sp.comm.collectives import gather_objects
from lightning_sp.comm.cpu.shared_memory import arena_of, connect
from lightning_sp.comm.groups import cached_per_world, group_name, group_of, make_group, set_world_timeout
from lightning_sp.comm.point_to_point import num_passes
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout
from lightning_sp.nodes import ring_blocks, token_blocks, ulysses_blocks

DATA, SEQUENCE, TENSOR = "data_parallel", "sequence_parallel", "tensor_parallel"


def build_device_mesh(
    device_type: str, *, data_parallel_size: int, sequence_parallel_size: int, tensor_parallel_size: int = 1
) -> DeviceMesh:
    """Build the mesh that exists before the model is known: data_parallel x sequence_parallel x tensor_parallel.

    Lightning's sampler reads its axis ``data_parallel``. Communicates: group creation on every rank, once for equal sizes.
    """
    sizes = (data_parallel_size, sequence_parallel_size, tensor_parallel_size)
    return _device_mesh(device_type, sizes, (DATA, SEQUENCE, TENSOR))


def build_fsdp_mesh(device_type: str, *, world_size: int, shard_size: int, tensor_parallel_size: int = 1) -> DeviceMesh:
    """Build the mesh of the parameters: FSDP2's one axis when everything is sharded, else replicate x shard (hybrid sharding).

    With tensor parallelism its last axis is that; FSDP2 gets the others (`fsdp_axes`), for each tensor-parallel rank. Its groups are no one
    else's, also where another has the same ranks: on NCCL a group is a communicator, and what is posted on one waits for what was posted before.

    Communicates: group creation on every rank, once for equal sizes. On NCCL each group makes its communicator in its first collective.
    """
    return _fsdp_mesh(device_type, world_size, shard_size, tensor_parallel_size)


def fsdp_axes(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of a mesh of parameters over which FSDP2 shards and replicates."""
    names = mesh.mesh_dim_names or ()
    return mesh if TENSOR not in names else mesh[names[:-1]]


def tensor_axis(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the part of a mesh of parameters over which layers are split; None where they are not."""
    return mesh[TENSOR] if TENSOR in (mesh.mesh_dim_names or ()) else None


def tensor_parallel_part(parameter: Tensor) -> tuple[int, int | None]:
    """Return over how many ranks layers are split, and along which dim a sharded parameter is; None where it is whole on each of them."""
    if not isinstance(parameter, DTensor) or TENSOR not in (parameter.device_mesh.mesh_dim_names or ()):
        return 1, None
    placement = parameter.placements[-1]
    return parameter.device_mesh.size(-1), placement.dim if isinstance(placement, Shard) else None


def gathered_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape that FSDP2 gathers of a sharded parameter: of a split layer's, a rank's part."""
    size, dim = tensor_parallel_part(parameter)
    return tuple(extent // size if axis == dim else extent for axis, extent in enumerate(parameter.shape))


@cached_per_world
def _fsdp_mesh(device_type: str, world_size: int, shard_size: int, tensor_parallel_size: int) -> DeviceMesh:
    # Not init_device_mesh: for an axis of all ranks it takes the world's group.
    ranks = torch.arange(world_size).view(-1, shard_size, tensor_parallel_size)
    axes = {"dp_replicate": 0, "dp_shard": 1, TENSOR: 2}
    if tensor_parallel_size == 1:
        del axes[TENSOR]
    if shard_size * tensor_parallel_size == world_size:
        del axes["dp_replicate"]
    groups = [make_group(_blocks(ranks, axis), name.replace("dp", "fsdp")) for name, axis in axes.items()]
    names = tuple(axes)
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
    shape = [ranks.shape[axis] for axis in axes.values()]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks.view(shape), mesh_dim_names=names)


def _blocks(ranks: Tensor, axis: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that differ in their coordinate on one axis alone."""
    return tuple(tuple(row) for row in ranks.movedim(axis, -1).flatten(0, -2).tolist())


@cached_per_world
def _device_mesh(device_type: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> DeviceMesh:
    """Equal meshes of one world are one: a process group is a resource of the process."""
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=axes)
    for group in mesh.get_all_groups():
        set_world_timeout(group)
    return mesh


@cached_per_world
def make_token_group(world_size: int, tensor_parallel_size: int) -> ProcessGroup:
    """Make this rank's group of those that hold each token once, also where that is one rank: it is no world."""
    return make_group(token_blocks(world_size, tensor_parallel_size), "tokens")


@dataclass(frozen=True)
class SequenceMesh:
    """The attention's mesh dp x ring x ulysses x tp, and this rank's coordinates in it.

    Args:
        base: the mesh data_parallel x sequence_parallel x tensor_parallel, whose second axis is ring x ulysses.
        layout: how that axis is split.
        ring_group: the group that passes keys and values on; None for a ring of one.
        ulysses_group: the group that exchanges heads for tokens; None for one rank.
        no_shared_memory: why ranks of a ring cannot read each other's memory, equal on all ranks of the world; empty if all can.
        token_group: the ranks that together hold each token of the global batch once; None for the world, where no weights are split.

    Sizes and ranks are asked for many times in a step, and torch slices its mesh for each answer: they are kept.
    """

    base: DeviceMesh
    layout: SequenceLayout
    ring_group: ProcessGroup | None
    ulysses_group: ProcessGroup | None
    no_shared_memory: str = ""
    token_group: ProcessGroup | None = None

    @classmethod
    def build(cls, base: DeviceMesh, *, ring_size: int, ulysses_size: int) -> SequenceMesh:
        """Split the sequence axis of `base` (see `build_device_mesh`) into ring x ulysses.

        Communicates: group creation and what `shared_memory.connect` needs on every rank, once for equal sizes; one all_gather of reasons.
        """
        size = base[SEQUENCE].size()
        assert ring_size * ulysses_size == size
        tensor = int(base[TENSOR].size())
        ring = group_of(ring_blocks(base.size(), size, ulysses_size, tensor))
        no_shared_memory = "" if ring is None else _share_memory(base, ring)
        neighbours = group_of(ulysses_blocks(base.size(), ulysses_size, tensor))
        tokens = None if tensor == 1 else make_token_group(base.size(), tensor)
        return cls(base, SequenceLayout(ring_size, ulysses_size), ring, neighbours, no_shared_memory, tokens)

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

    @cached_property
    def sequence_rank(self) -> int:
        """This rank's number among those that share its sequence; Ulysses is the faster axis."""
        return int(self.base.get_local_rank(SEQUENCE))

    @property
    def tensor_group(self) -> ProcessGroup:
        """The ranks that have the same tokens, and parts of the same weights."""
        return self.base.get_group(TENSOR)

    @cached_property
    def tensor_parallel_size(self) -> int:
        """How many ranks split the weights of a layer."""
        return int(self.base[TENSOR].size())

    @cached_property
    def tensor_parallel_rank(self) -> int:
        """Which part of each split weight this rank has."""
        return int(self.base.get_local_rank(TENSOR))

    @property
    def sample_rank(self) -> int:
        """This rank's number among those that compute its samples; those that split weights are neighbours."""
        return self.sequence_rank * self.tensor_parallel_size + self.tensor_parallel_rank

    @property
    def splits_samples(self) -> bool:
        """Whether several ranks compute the same samples: the tokens of a sequence are split, or the weights of layers."""
        return self.layout.size * self.tensor_parallel_size > 1

    @cached_property
    def data_parallel_rank(self) -> int:
        """Which samples this rank's group reads."""
        return int(self.base.get_local_rank(DATA))

    @cached_property
    def data_parallel_size(self) -> int:
        """How many groups read different samples."""
        return int(self.base[DATA].size())

    def describe(self) -> str:
        """Return the degrees in one line."""
        layout = self.layout
        tensor = f" x tp {self.tensor_parallel_size}" if self.tensor_parallel_size > 1 else ""
        return f"dp {self.data_parallel_size} x ring {layout.ring_size} x ulysses {layout.ulysses_size}{tensor}"


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
