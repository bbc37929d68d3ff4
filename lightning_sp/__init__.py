"""Sequence parallelism for PyTorch Lightning: exact, or refused.

    config -> mesh -> batch sharding -> model rewrite -> attention -> loss -> gradients -> checkpoint

These names are what a first script needs (`docs/api.md`); score functions, position biases and dropout come from `lightning_sp.attention`.
Importing the package registers the strategy, ``Trainer(strategy="sequence_parallel")``, and lets `load_from_checkpoint` read its folders.
"""

from lightning_sp.attention import AttentionMask, sequence_parallel_attention
from lightning_sp.checkpoint import export_checkpoint
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.data.batch.sharding import shard_batch, unshard
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout, shard
from lightning_sp.loss.cross_entropy import sharded_cross_entropy
from lightning_sp.loss.linear_cross_entropy import linear_cross_entropy
from lightning_sp.mesh import SequenceMesh, build_device_mesh
from lightning_sp.registration import register_strategy
from lightning_sp.strategy import SequenceParallelStrategy
from lightning_sp.trainer.checkpointing.load_from_checkpoint import read_checkpoint_folders

__version__ = "0.1.0"
__all__ = [
    "AttentionMask",
    "SequenceLayout",
    "SequenceMesh",
    "SequenceParallelError",
    "SequenceParallelStrategy",
    "ShardOptions",
    "build_device_mesh",
    "export_checkpoint",
    "linear_cross_entropy",
    "register_strategy",
    "sequence_parallel_attention",
    "shard",
    "shard_batch",
    "sharded_cross_entropy",
    "unshard",
]

register_strategy()
read_checkpoint_folders()
