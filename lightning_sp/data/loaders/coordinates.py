"""A rank's coordinates, as its loaders need them."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class DataCoordinates:
    """Where this rank lies on the axes, for its loaders.

    Args:
        dp_rank: data-parallel rank.
        dp_size: data-parallel size.
        sequence_group: ranks that share one sequence, on a backend for host objects; None for one rank.
        control_group: the world, likewise.
    """

    dp_rank: int
    dp_size: int
    sequence_group: ProcessGroup | None
    control_group: ProcessGroup | None
