"""Models of any size, built without memory and made one tensor at a time, bit for bit as one device builds them.

configure_model      recorder: large tensors have no memory; what is drawn, copied or read into them is noted      each rank
end of it            delayed_weights: parameters of the meta device, their recipes beside them
sharding             shards without values
initial weights      rank 0 makes one tensor, sends it, frees it                                                    each rank keeps its shard
"""

from lightning_sp.parallelize.delayed_init.delayed_weights import DelayedWeights, recorded

__all__ = ["DelayedWeights", "recorded"]
