"""The process groups each stage needs, as one value.

    world = dp x ring x ulysses x tp       attention's mesh; Ulysses on faster links than ring (USP, arXiv:2405.07719, section 4)
    world = replicate x shard              FSDP2's own mesh over the same rank order: shard_size may be below, equal to or above sp

The mesh owns groups and coordinates; it knows nothing of tensors or models.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_sp.layout import SequenceLayout

DATA, SEQUENCE, RING, ULYSSES, TENSOR = "data_parallel", "sequence_parallel", "ring", "ulysses", "tensor_parallel"


def build_device_mesh(device_type: str, *, data_parallel_size: int, sequence_parallel_size: int) -> DeviceMesh:
    """Build the mesh that exists before the model is known: data_parallel x sequence_parallel x tensor_parallel (size 1 for now).

    Lightning's sampler reads its axis ``data_parallel``. Communicates: group creation on every rank.
    """
    return init_device_mesh(
        device_type, (data_parallel_size, sequence_parallel_size, 1), mesh_dim_names=(DATA, SEQUENCE, TENSOR)
    )


def build_fsdp_mesh(device_type: str, *, world_size: int, shard_size: int) -> DeviceMesh:
    """Build FSDP2's mesh: one axis when everything is sharded, else replicate x shard (hybrid sharding).

    Communicates: group creation on every rank.
    """
    if shard_size == world_size:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("dp_shard",))
    return init_device_mesh(
        device_type, (world_size // shard_size, shard_size), mesh_dim_names=("dp_replicate", "dp_shard")
    )


@dataclass(frozen=True)
class SequenceMesh:
    """The attention's mesh dp x ring x ulysses x tp, and this rank's place in it.

    Args:
        mesh: a device mesh with the axes data_parallel, ring, ulysses, tensor_parallel, in this order.
        sequence_group: the group of the ring x ulysses ranks that share one sequence.
    """

    mesh: DeviceMesh
    sequence_group: ProcessGroup

    @classmethod
    def build(cls, base: DeviceMesh, *, ring_size: int, ulysses_size: int) -> SequenceMesh:
        """Split the sequence axis of `base` (see `build_device_mesh`) into ring x ulysses.

        Communicates: group creation on every rank.
        """
        dp, sp, tp = (base[axis].size() for axis in (DATA, SEQUENCE, TENSOR))
        assert ring_size * ulysses_size == sp
        mesh = init_device_mesh(
            base.device_type, (dp, ring_size, ulysses_size, tp), mesh_dim_names=(DATA, RING, ULYSSES, TENSOR)
        )
        return cls(mesh, base.get_group(SEQUENCE))

    @property
    def layout(self) -> SequenceLayout:
        """Return how sequences are split over this mesh."""
        return SequenceLayout(self.mesh[RING].size(), self.mesh[ULYSSES].size())

    @property
    def ring_group(self) -> ProcessGroup:
        """Return the group that passes keys and values on."""
        return self.mesh.get_group(RING)

    @property
    def ulysses_group(self) -> ProcessGroup:
        """Return the group that exchanges heads for tokens."""
        return self.mesh.get_group(ULYSSES)

    @property
    def data_group(self) -> ProcessGroup:
        """Return the group of ranks with the same tokens of different samples."""
        return self.mesh.get_group(DATA)

    @property
    def sequence_rank(self) -> int:
        """Return this rank's place among those that share its sequence."""
        return int(self.mesh.get_local_rank(RING)) * self.layout.ulysses_size + int(self.mesh.get_local_rank(ULYSSES))

    @property
    def data_parallel_rank(self) -> int:
        """Return which samples this rank's group reads."""
        return int(self.mesh.get_local_rank(DATA))

    @property
    def data_parallel_size(self) -> int:
        """Return how many groups read different samples."""
        return int(self.mesh[DATA].size())

    def describe(self) -> str:
        """Return the degrees in one line."""
        layout = self.layout
        return f"dp {self.data_parallel_size} x ring {layout.ring_size} x ulysses {layout.ulysses_size}"
