"""The distributed sampler of evaluation: the batches of the one-process run, dealt over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import DistributedSampler, SequentialSampler

from lightning_sp.data.samplers.batch_split import BatchSplit, check_rank
from lightning_sp.data.samplers.filler_index import FillerIndex


class EvaluationBatchSampler(DistributedSampler[list[int]], SequentialSampler):
    """Deal the batches of the one-process run over the data-parallel ranks: batch i goes to rank i % dp_size.

    Each sample is evaluated once. Ranks that would end a batch early get a batch of fillers: all ranks must take part in the same
    collectives. `num_filler_batches` counts them over all ranks. `drop_last` is torch's.
    """

    def __init__(
        self, num_samples: int, micro_batch_size: int, dp_rank: int = 0, dp_size: int = 1, *, drop_last: bool = False
    ) -> None:
        BatchSplit(micro_batch_size, 1, dp_size)  # its checks
        check_rank(num_samples, dp_rank, dp_size)
        self.num_samples, self.micro_batch_size = num_samples, micro_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.num_batches = num_samples // micro_batch_size if drop_last else -(-num_samples // micro_batch_size)
        self.num_filler_batches = -self.num_batches % dp_size
        self.epoch = 0

    def __len__(self) -> int:
        """Return the batches of each rank."""
        return -(-self.num_batches // self.dp_size)

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        """Yield this rank's batches, then its filler batch if it has one."""
        for batch in range(self.dp_rank, len(self) * self.dp_size, self.dp_size):
            is_filler = batch >= self.num_batches
            yield [FillerIndex(~i) for i in self.batch(self.num_batches - 1)] if is_filler else self.batch(batch)

    def batch(self, index: int) -> list[int]:
        """Return the samples of one batch of the one-process run."""
        first = index * self.micro_batch_size
        return list(range(first, min(first + self.micro_batch_size, self.num_samples)))

    def set_epoch(self, epoch: int) -> None:
        """Do nothing to the order: evaluation is the same in every epoch."""
        self.epoch = epoch
