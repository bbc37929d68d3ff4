"""What crosses from a node to the others, by formula, and counted at its link.

The formulas are those of the docstrings of `lightning_sp.attention.schemes`, pair by pair: a rank's partners on its own node do not count.
A link counts whole frames. Of each frame 66 bytes are headers: Ethernet 14, IPv4 20, TCP 20 and its timestamps 12. What is left is what the
sockets were given, to the byte, if nothing is sent again: these links drop nothing, and a busy host sends again what is answered late.

gloo sends 48 bytes before each message. With 48 more its receiver says that it waits for it; with 48 more its sender says that it is there, and
leaves that out where it has heard of the receiver first. So two passes may differ by 48 bytes for each message that leaves.
"""

from __future__ import annotations

import math
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from lightning_sp.attention.schemes.ulysses import HeadSplit
from lightning_sp.layout import SequenceLayout

HEADER_BYTES, CONTROL_BYTES = 66, 48
# A ring's: keys, keys again, gradients home. Ulysses': queries with keys and values, the output, the gradients of both, and delta.
_RING_MESSAGES, _ULYSSES_MESSAGES = 3, 5
_COUNTERS = Path("/sys/class/net/eth0/statistics")


@dataclass(frozen=True)
class Sent:
    """What a node's link has sent."""

    bytes: int
    frames: int

    @classmethod
    def now(cls) -> Sent:
        """Read the counters of this process' node."""
        return cls(*(int((_COUNTERS / name).read_text()) for name in ("tx_bytes", "tx_packets")))

    def payload_since(self, before: Sent) -> int:
        """Return the bytes of the sockets alone, sent since an earlier reading."""
        return (self.bytes - before.bytes) - HEADER_BYTES * (self.frames - before.frames)


def sent_in_messages(port_of_store: int) -> int:
    """Return the bytes of messages between ranks that this node's open connections have sent to other nodes, once each.

    Without words in the store, whose connections come and go with each run's watch.
    """
    told = subprocess.run(["ss", "-tinOH"], check=True, capture_output=True, text=True).stdout
    sent = 0
    for line in told.splitlines():
        (here, port), (there, port_there) = (each.rpartition(":")[::2] for each in line.split()[3:5])
        if here != there and str(port_of_store) not in (port, port_there):
            all_sent, again = (re.search(rf"\b{name}:(\d+)", line) for name in ("bytes_sent", "bytes_retrans"))
            sent += int(all_sent[1] if all_sent else 0) - int(again[1] if again else 0)
    return sent


def ring_pair_units(rank: int, to: int, *, causal: bool) -> int:
    """Return what one ring rank sends another in a forward and a backward, in units of its local K (or V), for one document.

    Causal, in zigzag: keys and values, both chunks to an earlier rank, the early one to a later; twice. Gradients go the other way.
    """
    if not causal:
        return 2 + 2 + 2
    keys, home = (2, 1) if to < rank else (1, 2)
    return keys + keys + home


def ulysses_pair_elements(split: HeadSplit, rank: int, to: int, dim: int) -> int:
    """Return what one Ulysses rank sends another in a forward and a backward, in elements for each own token and row."""
    (q, k), (own_q, own_k) = (
        tuple(end - start for start, end in (split.queries(u), split.keys(u))) for u in (to, rank)
    )
    return dim * ((q + 2 * k) + own_q + q + (own_q + 2 * own_k)) + q


def crossing_messages(layout: SequenceLayout, ranks_per_node: int, num_barriers: int) -> int:
    """Return how many messages of gloo leave a node in one attention's forward and backward and some barriers of all ranks."""
    of_attention = 0
    for rank in range(ranks_per_node):
        ring_rank, ulysses_rank = layout.coordinates(rank)
        for other in range(ranks_per_node, layout.size):
            to_ring, to_ulysses = layout.coordinates(other)
            of_attention += _ULYSSES_MESSAGES * (ring_rank == to_ring) + _RING_MESSAGES * (ulysses_rank == to_ulysses)
    # In a barrier each rank sends to those 1, 2, 4, ... after it.
    return of_attention + num_barriers * ranks_per_node * math.ceil(math.log2(layout.size))


def crossing_elements(
    layout: SequenceLayout,
    ranks_per_node: int,
    node: int,
    *,
    heads: int,
    kv_heads: int,
    length: int,
    dim: int,
    causal: bool,
) -> int:
    """Return the elements that leave a node in one attention's forward and backward, of one row of one sequence over all nodes."""
    tokens = length // layout.size
    split = HeadSplit(heads, kv_heads, layout.ulysses_size)
    own = range(node * ranks_per_node, (node + 1) * ranks_per_node)
    sent = 0
    for rank in own:
        ring_rank, ulysses_rank = layout.coordinates(rank)
        for other in (each for each in range(layout.size) if each not in own):
            to_ring, to_ulysses = layout.coordinates(other)
            if ring_rank == to_ring:
                sent += tokens * ulysses_pair_elements(split, ulysses_rank, to_ulysses, dim)
            if ulysses_rank == to_ulysses:
                first, last = split.keys(ulysses_rank)
                unit = (last - first) * tokens * layout.ulysses_size * dim
                sent += unit * ring_pair_units(ring_rank, to_ring, causal=causal)
    return sent
