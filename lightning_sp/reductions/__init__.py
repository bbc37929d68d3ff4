"""What a loss is made of: sums, means and parts of whole sequences and whole batches, with exact gradients.

Every function means the same on one device. Inside a step on shards it looks at the tokens of all ranks; anywhere else it is plain torch.
"""

from lightning_sp.reductions.batch import batch_mean, batch_sum, gather_rows
from lightning_sp.reductions.positions import at_positions, last_token
from lightning_sp.reductions.sequence import sequence_max, sequence_mean, sequence_sum
from lightning_sp.reductions.whole import document_ids, shard, shift, unshard

__all__ = [
    "at_positions",
    "batch_mean",
    "batch_sum",
    "document_ids",
    "gather_rows",
    "last_token",
    "sequence_max",
    "sequence_mean",
    "sequence_sum",
    "shard",
    "shift",
    "unshard",
]
