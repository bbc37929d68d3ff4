"""Options of the attention: how every attention of a run is computed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypedDict

from lightning_sp.config.checks import check_name, check_switches
from lightning_sp.errors import SequenceParallelError

KERNELS = ("auto", "torch", "flash_attn")
RING_TRANSPORTS = ("auto", "shared_memory", "network")
RING_METHODS = ("auto", "hops", "all_gather")


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """How every attention of a run is computed; nothing of it changes a result.

    Args:
        kernel: Local attention kernel. "auto" is torch's own; "flash_attn" is refused where it is not installed.
        ring_transport: How keys and values reach the other ranks of a ring. "shared_memory": read in place, by CPU ranks of one
            machine; "network": messages of the process group; "auto": shared memory where it is possible, else the network.
        ring_saves_kv: Save keys and values that arrived over the network for the backward. A third fewer bytes travel, and memory holds up to
            ring_size - 1 times the local keys and values of each layer. With ring_transport="auto" the network is taken.
        ring_method: When the keys and values of other ranks arrive. "hops": rank by rank, each while the one before is computed; "all_gather":
            all that are needed first, then computed at once, which takes up to ring_size - 1 times the local keys and values of a layer more;
            "auto": that on CPU ranks for sequences so short that a hop does not pay, else hops; a GPU was not measured.
        ulysses_stages: Stages of heads in which Ulysses exchanges and attends, the next stage's exchange behind this one's kernel. What is sent
            and received at a time shrinks by as much; the bytes in all and what is saved for the backward do not. They divide the query heads
            of a rank. Without Ulysses there is nothing to exchange.

    Raises:
        SequenceParallelError: an unknown name, a switch that is no bool, a number that is none, or keys saved where none travel.
    """

    kernel: str = "auto"
    ring_transport: str = "auto"
    ring_saves_kv: bool = False
    ring_method: str = "auto"
    ulysses_stages: int = 1

    def __post_init__(self) -> None:
        check_name("kernel", self.kernel, KERNELS)
        check_name("ring_transport", self.ring_transport, RING_TRANSPORTS)
        check_name("ring_method", self.ring_method, RING_METHODS)
        check_switches(self)
        if isinstance(self.ulysses_stages, bool) or not isinstance(self.ulysses_stages, int) or self.ulysses_stages < 1:
            raise SequenceParallelError(f"ulysses_stages={self.ulysses_stages!r}: must be a positive integer")
        if self.ring_saves_kv and self.ring_transport not in ("auto", "network"):
            raise SequenceParallelError(
                f"ring_saves_kv=True with ring_transport={self.ring_transport!r}: no keys and values travel there, each rank reads them in "
                "place, so there is nothing to save; use ring_transport='network' (or 'auto', which then takes it), or ring_saves_kv=False"
            )

    @property
    def effective_ring_transport(self) -> str:
        """The transport that is asked for: keys that are to be saved are those of the network."""
        return "network" if self.ring_saves_kv else self.ring_transport

    def keywords(self) -> AttentionKeywords:
        """Return them as `sequence_parallel_attention` takes them."""
        found: Any = {name: getattr(self, name) for name in ATTENTION_OPTIONS}
        keywords: AttentionKeywords = found
        return keywords

    @property
    def attention(self) -> AttentionOptions:
        """The attention's options alone, of a strategy's."""
        return AttentionOptions(**self.keywords())


ATTENTION_OPTIONS = tuple(f.name for f in fields(AttentionOptions))


class AttentionKeywords(TypedDict, total=False):
    """The same as keywords of a function, for type checkers and editors."""

    kernel: str
    ring_transport: str
    ring_saves_kv: bool
    ring_method: str
    ulysses_stages: int


def check_stages(stages: int, num_query_heads: int, ulysses_size: int) -> None:
    """Refuse stages in which ranks would have unequal numbers of heads. Without Ulysses nothing is exchanged, in however many stages.

    Raises:
        SequenceParallelError: the stages do not divide the query heads of each rank.
    """
    own, rest = divmod(num_query_heads, ulysses_size)
    if ulysses_size == 1 or stages == 1 or (not rest and own % stages == 0):
        return
    allowed = [1] if rest else [n for n in range(1, own + 1) if own % n == 0]
    held = f"{own + 1} or {own}" if rest else str(own)
    raise SequenceParallelError(
        f"ulysses_stages={stages} with {num_query_heads} query heads over ulysses_size={ulysses_size}: every stage has equally many heads on "
        f"each rank, and a rank has {held}; it can be one of {allowed} here"
    )
