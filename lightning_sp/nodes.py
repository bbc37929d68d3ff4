"""Which ranks share a node, and what a split of a sequence sends from node to node. Pure functions of sizes; no process.

A node's ranks are neighbours, and so are those of a Ulysses group; a ring takes one rank of each. 2 nodes x 4, ring 2 x ulysses 4:

    node 0:  0 1 2 3      an all-to-all among 0 1 2 3, another among 4 5 6 7: inside a node
    node 1:  4 5 6 7      hops 0 - 4, 1 - 5, 2 - 6, 3 - 7: across

Links inside a node are many times faster than those between nodes, so that what crosses decides which split is better.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Blocks = tuple[tuple[int, ...], ...]  # a partition of the world into groups of ranks


def ulysses_blocks(world_size: int, ulysses_size: int, tensor_parallel_size: int = 1) -> Blocks:
    """Return the groups that exchange heads: neighbours, but for the ranks that split their weights."""
    return _spread(_blocks(world_size // tensor_parallel_size, ulysses_size), tensor_parallel_size)


def ring_blocks(
    world_size: int, sequence_parallel_size: int, ulysses_size: int, tensor_parallel_size: int = 1
) -> Blocks:
    """Return the groups that pass keys and values on: one rank of each Ulysses group of a sequence."""
    rings = tuple(
        tuple(range(first + ulysses_rank, first + sequence_parallel_size, ulysses_size))
        for first in range(0, world_size // tensor_parallel_size, sequence_parallel_size)
        for ulysses_rank in range(ulysses_size)
    )
    return _spread(rings, tensor_parallel_size)


def sample_blocks(world_size: int, sequence_parallel_size: int, tensor_parallel_size: int = 1) -> Blocks:
    """Return the groups that read the same samples: the ranks of a sequence, with those that split the weights of each."""
    return _blocks(world_size, sequence_parallel_size * tensor_parallel_size)


def token_blocks(world_size: int, tensor_parallel_size: int) -> Blocks:
    """Return the groups that hold each token of the global batch once: the ranks with the same part of every split weight."""
    return _spread(
        _blocks(world_size // tensor_parallel_size, world_size // tensor_parallel_size), tensor_parallel_size
    )


def _blocks(world_size: int, size: int) -> Blocks:
    return tuple(tuple(range(first, first + size)) for first in range(0, world_size, size))


def _spread(blocks: Blocks, stride: int) -> Blocks:
    """Put `stride` ranks in the place of each one, and return the blocks of the first ones, the second ones, ..."""
    return tuple(tuple(rank * stride + offset for rank in block) for block in blocks for offset in range(stride))


def ranks_per_node(world_size: int, *, num_nodes: int, environment: Mapping[str, str]) -> int:
    """Return how many ranks this rank's node has.

    Args:
        world_size: all ranks.
        num_nodes: `Trainer(num_nodes=...)`, which Lightning compares with SLURM's; under torchrun it knows the product with the devices alone.
        environment: the process's variables: torchrun writes the number itself.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        return int(environment["LOCAL_WORLD_SIZE"])
    return max(world_size // num_nodes, 1)


def common_ranks_per_node(world_size: int, numbers: Iterable[int]) -> int:
    """Return the largest number of neighbours that are on one node wherever they begin at its multiple.

    Args:
        world_size: all ranks.
        numbers: of all ranks, how many their node has: nodes may differ.
    """
    return math.gcd(world_size, *numbers)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The ranks of all sequences on their nodes, and the heads of the attention that they share.

    Args:
        world_size: all ranks.
        sequence_parallel_size: neighbours that share a sequence; divides the world.
        ranks_per_node: neighbours that share a node; divides the world.
        num_heads: H, query heads.
        num_kv_heads: K, key-value heads.
        tensor_parallel_size: neighbours that have the same tokens, and H and K of the heads each.
    """

    world_size: int
    sequence_parallel_size: int
    ranks_per_node: int
    num_heads: int
    num_kv_heads: int
    tensor_parallel_size: int = 1

    def exchanges_across_nodes(self, ulysses_size: int) -> bool:
        """Return whether some Ulysses group has ranks on several nodes."""
        return self._peers_elsewhere(self._ulysses_blocks(ulysses_size)) > 0

    def bytes_across_nodes(self, ulysses_size: int) -> float:
        """Return what a rank sends to other nodes in a layer's forward and backward, for each of its tokens and of a head's D elements.

        In 16 bits, with a causal mask, on average over the ranks. A rank has x_U peers of its Ulysses group and x_R peers of its ring on other
        nodes, on average; K' is the sum over the Ulysses ranks of the key-value heads that each needs, from K (U divides K) to U (U > K):

            all-to-alls    x_U 8 (H + K') / U    to each peer q, k, v of its heads (H + 2 K') / U, and out H / U; the backward the same
            hops           x_R 12 K'             to each peer K and V of U tokens and K' / U heads, 3/4 of them for zigzag: 3 K' in 16 bits in
                                                 the forward, again in the backward, and their gradients home in float32: 3 K' (2 + 2 + 4) / 2

        2 nodes x 8, H = 32: K = 32, ring 2 x ulysses 8: 384 bytes, ulysses 16: 256. K = 4: 96, against 192.
        """
        keys = self._keys_of_all_ranks(ulysses_size)
        exchanged = self._peers_elsewhere(self._ulysses_blocks(ulysses_size))
        passed = self._peers_elsewhere(
            ring_blocks(self.world_size, self.sequence_parallel_size, ulysses_size, self.tensor_parallel_size)
        )
        return (8 * exchanged * (self.num_heads + keys) / ulysses_size + 12 * passed * keys) / self.world_size

    def best_ulysses_size(self, sizes: Iterable[int]) -> int:
        """Return the size that sends the fewest bytes across nodes.

        Of equals, the largest whose all-to-alls stay inside a node, else the smallest: hops are in flight while blocks are computed.
        """

        def order(size: int) -> tuple[float, int, int]:
            across = self.exchanges_across_nodes(size)
            return self.bytes_across_nodes(size), across, size if across else -size

        return min(sizes, key=order)

    def _ulysses_blocks(self, ulysses_size: int) -> Blocks:
        return ulysses_blocks(self.world_size, ulysses_size, self.tensor_parallel_size)

    def _peers_elsewhere(self, blocks: Blocks) -> int:
        """Return the number of pairs (rank, peer of its group on another node)."""
        pairs = 0
        for block in blocks:
            on_node = Counter(rank // self.ranks_per_node for rank in block)
            pairs += len(block) ** 2 - sum(number**2 for number in on_node.values())
        return pairs

    def _keys_of_all_ranks(self, ulysses_size: int) -> int:
        """Return K': each key-value head, once more for each rank that begins amid its query heads."""
        base, more = divmod(self.num_heads, ulysses_size)
        shared = max(self.num_heads // self.num_kv_heads, 1)
        begins = (rank * base + min(rank, more) for rank in range(1, ulysses_size))
        return self.num_kv_heads + sum(begin % shared > 0 for begin in begins)
