"""How a global batch is cut into micro-batches: micro_batch_size x accumulation x data-parallel size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_sp.errors import SequenceParallelError

Last = Literal["pad", "drop", "drop_micro"]


def num_trained(num_samples: int, global_batch_size: int, accumulation: int, last: Last) -> int:
    """Return how many samples an epoch trains; what is left is dropped."""
    unit = {"pad": 1, "drop": global_batch_size, "drop_micro": global_batch_size // accumulation}[last]
    return num_samples // unit * unit


@dataclass(frozen=True)
class BatchSplit:
    """How a global batch is cut: micro_batch_size * accumulation * dp_size samples make one optimizer step."""

    micro_batch_size: int
    accumulation: int = 1
    dp_size: int = 1

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "accumulation", "dp_size"):
            if getattr(self, name) < 1:
                raise SequenceParallelError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def global_batch_size(self) -> int:
        """Samples in one optimizer step, over all data-parallel ranks."""
        return self.micro_batch_size * self.accumulation * self.dp_size

    def require(self, global_batch_size: int, *, origin: str) -> None:
        """Refuse a split that does not make `global_batch_size`, naming those that do at this dp_size.

        Raises:
            SequenceParallelError: With the product and the (micro_batch_size, accumulation) pairs that work.
        """
        if self.global_batch_size == global_batch_size:
            return
        given = f"micro_batch_size {self.micro_batch_size} x accumulation {self.accumulation} x dp {self.dp_size}"
        message = f"{given} = {self.global_batch_size} samples a step, but {origin} is {global_batch_size}: "
        per_rank, rest = divmod(global_batch_size, self.dp_size)
        if rest or per_rank < 1:
            degrees = [d for d in range(1, global_batch_size + 1) if global_batch_size % d == 0]
            raise SequenceParallelError(
                message + f"{global_batch_size} is not a multiple of dp {self.dp_size}; dp may be one of {degrees}"
            )
        pairs = [(m, per_rank // m) for m in range(1, per_rank + 1) if per_rank % m == 0]
        raise SequenceParallelError(
            message + f"at dp {self.dp_size} these (micro_batch_size, accumulate_grad_batches) do: {pairs}"
        )


def check_rank(num_samples: int, dp_rank: int, dp_size: int) -> None:
    """Refuse an empty dataset, or a rank that is none of the data-parallel ones."""
    if num_samples < 1:
        raise SequenceParallelError(
            f"a sampler needs at least 1 sample, got {num_samples}: the data set of a loader is empty; look at its path or filter, or leave the "
            "loader out"
        )
    if not 0 <= dp_rank < dp_size:
        raise SequenceParallelError(f"dp_rank {dp_rank} is not in [0, {dp_size}), the data-parallel ranks")
