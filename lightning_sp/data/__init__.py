"""Batches for sequence parallelism: the order of samples, loaders, resuming, sharding. What a sample is made of: `lightning_sp.text`."""

from lightning_sp.data.batch.sharded_batch import ShardedBatch
from lightning_sp.data.datamodule import SequenceShardingDataModule
from lightning_sp.data.loaders.collate import Batches, stack
from lightning_sp.data.loaders.lazy_loader import LazyDataLoader
from lightning_sp.data.samplers.batch_split import BatchSplit
from lightning_sp.data.samplers.evaluation_sampler import EvaluationBatchSampler
from lightning_sp.data.samplers.training_sampler import GlobalBatchSampler, epoch_permutation

__all__ = [
    "BatchSplit",
    "Batches",
    "EvaluationBatchSampler",
    "GlobalBatchSampler",
    "LazyDataLoader",
    "SequenceShardingDataModule",
    "ShardedBatch",
    "epoch_permutation",
    "stack",
]
