"""Users' own loaders: the same samples for all ranks of a sequence, different ones for each data-parallel rank.

Where a loader is a plain `DataLoader` over a map-style dataset, its sampler is replaced by one of ours. Where it cannot be
(iterable or streaming datasets, own samplers, own loader classes), one rank of each sequence's group reads, and sends every batch to its
peers. Their batches cannot differ then, whatever the loader's seeds and workers do. With `use_distributed_sampler=False` the user has split the
samples: each rank reads its own. In training such batches are dealt over the data-parallel groups, unless the user has split them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from lightning_sp import comm
from lightning_sp.data.loaders.broadcast_loader import BroadcastLoader
from lightning_sp.data.loaders.coordinates import DataCoordinates
from lightning_sp.data.loaders.deal import deal_indices
from lightning_sp.data.loaders.replace_sampler import (
    can_replace_sampler,
    described_order,
    has_our_sampler,
    replace_sampler,
)
from lightning_sp.errors import SequenceParallelError


def same_samples(
    loader: Any,
    coordinates: DataCoordinates,
    *,
    training: bool,
    accumulation: int,
    seed: int,
    by_hand: bool,
    own_samplers: bool = False,
) -> Any:
    """Return a loader that gives all ranks of a sequence the same samples: its order replaced, or one rank of each sequence reading.

    Args:
        loader: the user's.
        coordinates: this rank's.
        training: whether its order is one of training.
        accumulation: micro-batches of an optimizer step.
        seed: of the shuffle.
        by_hand: each rank's loader gives its own part of every batch.
        own_samplers: `Trainer(use_distributed_sampler=False)`: each rank reads its loader as it is; whether the ranks of a sequence read the
            same samples is checked batch by batch.

    Communicates: what the loader is, where its order is replaced.

    Raises:
        SequenceParallelError: ranks have loaders of other datasets or batches, of which they would share one order.
    """
    if has_our_sampler(loader):
        return loader
    world = comm.size_of(coordinates.control_group or comm.world())
    replaced = can_replace_sampler(loader) and not own_samplers
    if world > 1:
        seed = _agreed_seed(loader, coordinates, seed, replaced=replaced)
    if replaced and not training and not len(loader.dataset):
        return loader  # of no batches, on all ranks: Lightning leaves the evaluation out
    if replaced:
        return replace_sampler(loader, coordinates, training=training, accumulation=accumulation, seed=seed)
    if world == 1:
        return BroadcastLoader(loader, coordinates, step_batches=accumulation) if training else loader
    kind = type(loader).__name__
    if own_samplers:
        rank_zero_info(
            f"sequence_parallel: use_distributed_sampler=False: every rank reads {kind} as it is; the ranks of a sequence must read the same "
            "samples, so split by trainer.strategy.data_parallel_rank and data_parallel_size"
        )
        return BroadcastLoader(loader, replace(coordinates, sequence_group=None), trains=training)
    if by_hand:
        rank_zero_info(
            f"sequence_parallel: the order of {kind} cannot be replaced, and with shard_batch=False every rank reads its own part"
        )
        return BroadcastLoader(loader, replace(coordinates, sequence_group=None), trains=training)
    return _read_by_one(loader, coordinates, accumulation=accumulation if training else None, seed=seed)


def _agreed_seed(loader: Any, coordinates: DataCoordinates, seed: int, *, replaced: bool) -> int:
    """Return rank 0's seed; refuse a loader of which ranks have different ones. Every rank must call it."""
    own = described_order(loader) if replaced else "samples in an order of their own"
    of_ranks = comm.gather_objects((seed, own), coordinates.control_group)
    holders: dict[str, list[int]] = {}
    for rank, (_, each) in enumerate(of_ranks):
        holders.setdefault(each, []).append(rank)
    if len(holders) > 1:
        found = "; ".join(f"{each} on rank {', '.join(map(str, ranks))}" for each, ranks in holders.items())
        raise SequenceParallelError(
            f"ranks have other loaders: {found}: must be the same on all, for each takes its share of one order over all samples; give every "
            "rank the same dataset, or, where a rank's dataset is its own part of the data, Trainer(use_distributed_sampler=False)"
        )
    seeds = [each for each, _ in of_ranks]
    if len(set(seeds)) > 1 and "shuffled" in own:
        rank_zero_info(
            f"sequence_parallel: ranks have other seeds ({', '.join(map(str, dict.fromkeys(seeds)))}): the samples are shuffled by rank 0's, "
            "for each rank takes its share of one order"
        )
    return int(seeds[0])


def _read_by_one(loader: Any, coordinates: DataCoordinates, *, accumulation: int | None, seed: int) -> BroadcastLoader:
    """Return a loader that one rank of each sequence's group reads; its batches are dealt over the groups if nobody split them."""
    training = accumulation is not None
    own, dealt = deal_indices(loader, coordinates, seed)
    found = BroadcastLoader(own, coordinates, dealt, accumulation, trains=training)
    streamed = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    if training and streamed and coordinates.sequence_group is not None and found.peers_read_others():
        rank_zero_warn(
            f"one rank of each sequence reads {type(loader.dataset).__name__} and sends its batches to its peers, which would have read "
            "others: what it gives them is not trained on. Where it splits by the process' rank (torch.distributed.get_rank(), RANK, "
            "split_by_node), split by trainer.strategy.data_parallel_rank and data_parallel_size; where it shuffles without a seed, nothing is "
            "lost"
        )
    said = ""
    if coordinates.dp_size > 1:
        if dealt is None:
            found.find_deals()
        said = (
            f"; the groups read other samples: they are split over the {coordinates.dp_size} groups already"
            if dealt is None and not found.deals
            else f"; batches are dealt over the {coordinates.dp_size} data-parallel groups, batch i to group i % {coordinates.dp_size}"
        )
        if found.deals:
            said += ", and each group reads all of them: split the data by trainer.strategy.data_parallel_rank to read each once"
    rank_zero_info(
        f"sequence_parallel: the order of {type(loader).__name__} cannot be replaced, so one rank of each sequence's group reads it and sends "
        f"the batches to its peers{said}"
    )
    return found
