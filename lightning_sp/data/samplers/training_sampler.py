"""The distributed sampler of training: which sample comes when is a function of (seed, epoch, global index), whatever the degrees.

A global batch of size G = m * a * dp takes G consecutive samples of the epoch's permutation. They are dealt out micro-batch by
micro-batch, so that another (m, a, dp) of the same G moves no sample to another global batch:

    index in the global batch   0 .. m-1 | m .. 2m-1 | ... | dp*m .. dp*m+m-1 | ...
    dp rank                        0     |     1     | ... |        0         | ...
    micro-batch                    0     |     0     | ... |        1         | ...

The last micro-batch of an epoch may be short. A rank that would have no sample gets fillers (`loaders.fillers`), for it must take part in the
others' collectives. A micro-batch without a sample on any rank is left out: it would add nothing and log a loss of 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler, SequentialSampler

from lightning_sp.data.samplers.batch_split import BatchSplit, Last, check_rank, num_trained
from lightning_sp.data.samplers.filler_index import FillerIndex
from lightning_sp.errors import SequenceParallelError


def epoch_permutation(seed: int, epoch: int, num_samples: int) -> NDArray[np.int64]:
    """Return the order of all samples in one epoch.

    It sorts raw PCG64 words, whose stream numpy promises to keep, instead of calling a shuffle that may change with
    the version: a checkpoint resumes on the same samples after an upgrade.
    """
    if seed < 0 or epoch < 0 or num_samples < 0:
        raise SequenceParallelError(
            f"seed {seed}, epoch {epoch} and num_samples {num_samples} must not be negative: give 0 or more"
        )
    keys = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(num_samples)
    return np.argsort(keys, kind="stable").astype(np.int64)


class GlobalBatchSampler(DistributedSampler[list[int]]):
    """Yield one data-parallel rank's micro-batches of every global batch, in order; all ranks yield equally many.

    It is a `DistributedSampler` by class because that is what it is by meaning, and because frameworks that inject
    one (Lightning) leave a loader alone that has one. Use it as ``DataLoader(..., batch_sampler=sampler)`` or, for
    Lightning, ``DataLoader(batches, batch_size=None, sampler=sampler)``.

    What has been consumed is known to the trainer alone (workers fetch ahead), so `state_dict` takes the number of micro-batches.

    Args:
        num_samples: Size of the dataset.
        split: How the global batch is cut.
        dp_rank: This rank's coordinate on the data-parallel axis.
        seed: Of the order.
        shuffle: False keeps the samples in order, each epoch.
        last: What is left at the epoch's end: "pad" trains it as a short step (with fillers on ranks that have no sample),
            "drop" leaves out an unfinished global batch, "drop_micro" an unfinished micro-batch over all ranks (torch's
            `drop_last`). `num_dropped` counts.
    """

    def __init__(
        self,
        num_samples: int,
        split: BatchSplit,
        dp_rank: int = 0,
        *,
        seed: int = 0,
        shuffle: bool = True,
        last: Last = "pad",
    ) -> None:
        # DistributedSampler.__init__ is not called: it wants the dataset and would compute another split.
        check_rank(num_samples, dp_rank, split.dp_size)
        if last not in ("pad", "drop", "drop_micro"):
            raise SequenceParallelError(f"last must be 'pad', 'drop' or 'drop_micro', got {last!r}")
        size = split.global_batch_size
        self.num_trained = num_trained(num_samples, size, split.accumulation, last)
        if not self.num_trained:
            what = (
                f"one global batch of {size}" if last == "drop" else f"one micro-batch of {size // split.accumulation}"
            )
            raise SequenceParallelError(
                f"last={last!r} leaves nothing: {num_samples} samples are fewer than {what} over {split.dp_size} data-parallel "
                "ranks; use last='pad' (drop_last=False), smaller batches or more data"
            )
        self.num_samples, self.split, self.dp_rank = num_samples, split, dp_rank
        self.seed, self.shuffle, self.last = seed, shuffle, last
        self.num_global_batches = -(-self.num_trained // size)
        self.num_micro_batches = -(-self.num_trained // (size // split.accumulation))
        self.num_dropped = num_samples - self.num_trained
        ranks_with_samples = -(-self.num_samples_in(self.num_micro_batches - 1) // split.micro_batch_size)
        self.num_fillers = (split.dp_size - ranks_with_samples) * split.micro_batch_size
        self.epoch = 0
        self.global_samples_skipped = 0
        self.started_epoch: int | None = None

    def __len__(self) -> int:
        """Return the micro-batches of a whole epoch, also after a resume in its middle."""
        return self.num_micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the micro-batches that are left in this epoch."""
        self.started_epoch = self.epoch
        order = epoch_permutation(self.seed, self.epoch, self.num_samples) if self.shuffle else None
        m, dp_size = self.split.micro_batch_size, self.split.dp_size
        for micro_step in range(self.global_samples_skipped // (m * dp_size), self.num_micro_batches):
            first = (micro_step * dp_size + self.dp_rank) * m
            indices = range(first, min(first + m, self.num_trained))
            # A rank without a sample repeats others, as fillers: it must take part in their collectives.
            yield [self._sample_at(index, order) for index in indices or range(first, first + m)]

    @property
    def sampler(self) -> GlobalBatchSampler:
        """Return itself: of a loader's batch sampler Lightning turns the epochs of its ``sampler`` alone."""
        return self

    def num_samples_in(self, micro_batch: int) -> int:
        """Return the samples in one micro-batch of the epoch over all data-parallel ranks, fillers left out."""
        size = self.split.micro_batch_size * self.split.dp_size
        return max(0, min(size, self.num_trained - micro_batch * size))

    def _sample_at(self, index: int, order: NDArray[np.int64] | None) -> int:
        """Return the sample at an index of the epoch; behind its end, the first ones again as fillers."""
        wrapped = index % self.num_samples
        sample = wrapped if order is None else int(order[wrapped])
        return sample if index < self.num_samples else FillerIndex(~sample)

    def set_epoch(self, epoch: int) -> None:
        """Turn to an epoch. A cursor that was resumed holds for its own epoch alone."""
        if epoch != self.epoch:
            self.epoch, self.global_samples_skipped = epoch, 0

    def resume(self, global_samples_consumed: int, epoch: int) -> None:
        """Continue an epoch after so many global samples.

        Raises:
            SequenceParallelError: When that is no optimizer-step boundary of this sampler.
        """
        size = self.split.global_batch_size
        if global_samples_consumed % size or not 0 <= global_samples_consumed <= self.num_global_batches * size:
            raise SequenceParallelError(
                f"cannot continue after {global_samples_consumed} samples: the position must be a multiple of the "
                f"global batch size {size} and at most {self.num_global_batches * size}, the end of the epoch"
            )
        self.epoch, self.global_samples_skipped = epoch, global_samples_consumed

    def state_dict(self, consumed_batches: int, epoch: int | None = None) -> dict[str, Any]:
        """Return the cursor after `consumed_batches` micro-batches of the epoch (those before a resume included).

        Micro-batches of an unfinished accumulation do not count: their gradients are not in the weights.
        """
        whole_epoch = consumed_batches >= self.num_micro_batches  # its last step may take fewer micro-batches
        steps = self.num_global_batches if whole_epoch else consumed_batches // self.split.accumulation
        return {
            "epoch": self.epoch if epoch is None else epoch,
            "global_samples_consumed": steps * self.split.global_batch_size,
            "global_batch_size": self.split.global_batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_samples": self.num_samples,
            "last": self.last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the cursor that any split of the same global batch size has stored.

        Raises:
            SequenceParallelError: When the order or the global batch size differs, with the numbers.
        """
        for name in ("seed", "shuffle", "num_samples"):
            if state[name] != getattr(self, name):
                raise SequenceParallelError(
                    f"the data cursor was stored with {name} {state[name]}, this run has {getattr(self, name)}: "
                    f"the order of samples would differ; set {name} to {state[name]}, resume from a checkpoint that was stored behind an "
                    "epoch, or load the weights alone into the model before the Trainer gets it"
                )
        self.split.require(state["global_batch_size"], origin="the global batch size of the stored cursor")
        self.resume(state["global_samples_consumed"], state["epoch"])


class SequentialGlobalBatchSampler(GlobalBatchSampler, SequentialSampler):  # type: ignore[misc]
    """The same without shuffling. It is a `SequentialSampler` by class: Lightning's `overfit_batches` replaces any other."""

    def __init__(
        self,
        num_samples: int,
        split: BatchSplit,
        dp_rank: int = 0,
        *,
        last: Last = "pad",
        seed: int = 0,
    ) -> None:
        GlobalBatchSampler.__init__(self, num_samples, split, dp_rank, seed=seed, shuffle=False, last=last)
