"""The one table of options: names, defaults and rules. Reads nothing but its arguments; imports no torch.

`SequenceParallelStrategy`, `conf/strategy/*.yaml` and `--trainer.strategy.init_args.*` share these names, defaults and errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from lightning_sp.errors import SequenceParallelError, closest
from lightning_sp.nodes import Placement

Degree = int | Literal["auto"]
KERNELS = ("auto", "torch", "flash_attn")
RING_TRANSPORTS = ("auto", "shared_memory", "network")
RING_METHODS = ("auto", "hops", "all_gather")
BALANCES = ("auto", "zigzag", "documents")


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
            "auto": that for sequences so short that a hop does not pay.
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
        _check_name("kernel", self.kernel, KERNELS)
        _check_name("ring_transport", self.ring_transport, RING_TRANSPORTS)
        _check_name("ring_method", self.ring_method, RING_METHODS)
        _check_switches(self)
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


@dataclass(frozen=True, kw_only=True)
class StrategyConfig(AttentionOptions):
    """Validated options of the strategy, the attention's among them; everything but the degrees' resolution against the world.

    Args:
        sequence_parallel_size: Ranks that share one sequence. "auto": world / data_parallel_size, the whole world by default.
        data_parallel_size: Groups of ranks that read different samples. "auto": world / sequence_parallel_size.
        ulysses_size: Part of sequence_parallel_size that exchanges heads. "auto": as far as the model's query heads allow;
            over several nodes, what sends the fewest bytes between them (`nodes.Placement.bytes_across_nodes`).
        ring_size: Part of sequence_parallel_size that passes keys and values on. "auto": what Ulysses leaves.
        shard_size: Ranks over which FSDP2 splits parameters; the rest of the world replicates. "auto": the whole world.
        activation_checkpointing: Recompute each transformer block in the backward, but never its attention.
        compile: Compile each transformer block with torch.compile.
        preflight: Before the first step, compare loss and every gradient of a crop, whole against sharded; and what a step logs or predicts.
        preflight_tokens: Length of the preflight's crop, rounded up to what the degrees divide; "auto" chooses.
        shard_batch: Shard the batches; False for loaders that shard by hand.
        sequence_dims: Extra batch entries that carry the sequence, and along which dim: ``{"pixel_mask": 1}``. Names that begin with
            ``decoder_`` are of a second sequence, with a length of its own, as are the labels then. An empty one says that a batch without a
            known name holds no sequence, and runs whole.
        labels_shifted: Whether the batch's ``labels`` already hold the target of their own position. None: known by name
            alone (``shift_labels`` and ``targets`` are; ``labels`` of a Hugging Face model are not, an encoder-decoder's are), else refused.
        packed_documents: Whether position_ids that do not rise by one begin a document, to which attention keeps. None: known for
            `SequenceShardingDataModule`, and for Hugging Face models that get no attention mask (their own convention), else refused.
        balance: Which tokens each rank of a ring holds. "zigzag": balanced for one document. "documents": for each batch's packed documents, so
            that all ranks compute about equally many (query, key) pairs. "auto": that where zigzag is more than 5% off and it should pay.
        save_distributed_checkpoint: Write each checkpoint as a DCP directory; False: as one consolidated file, by rank 0.
        exclude_frozen_parameters: Leave frozen parameters that building the model gives again, the base of a LoRA, out of checkpoints. Each is
            known by a digest; one that was ever changed is saved, and a load into another base is refused.
        timeout_s: Time limit of every collective from the first batch on, in seconds.
        start_timeout_s: The same before it, in seconds: while rank 0 builds the model, reads its weights or a checkpoint, the others wait. Of a
            process group that others made neither limit is changed.
    """

    sequence_parallel_size: Degree = "auto"
    data_parallel_size: Degree = "auto"
    ulysses_size: Degree = "auto"
    ring_size: Degree = "auto"
    shard_size: Degree = "auto"
    activation_checkpointing: bool = False
    compile: bool = False
    preflight: bool = True
    preflight_tokens: Degree = "auto"
    shard_batch: bool = True
    sequence_dims: Mapping[str, int] | None = None
    labels_shifted: bool | None = None
    packed_documents: bool | None = None
    balance: str = "auto"
    save_distributed_checkpoint: bool = True
    exclude_frozen_parameters: bool = False
    timeout_s: float = 300.0
    start_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            "sequence_parallel_size",
            "data_parallel_size",
            "ulysses_size",
            "ring_size",
            "shard_size",
            "preflight_tokens",
        ):
            value = getattr(self, name)
            if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise SequenceParallelError(f"{name}={value!r}: must be a positive integer or 'auto'")
        for name, dim in (self.sequence_dims or {}).items():
            if isinstance(dim, bool) or not isinstance(dim, int):
                raise SequenceParallelError(f"sequence_dims[{name!r}]={dim!r}: must be the number of a dim")
        _check_name("balance", self.balance, BALANCES)
        if self.balance == "documents" and not self.shard_batch:
            raise SequenceParallelError(
                "balance='documents' with shard_batch=False: batches that are sharded by hand lie in zigzag; use balance='auto' or 'zigzag', or "
                "let the strategy shard"
            )
        _check_seconds("timeout_s", self.timeout_s)
        _check_seconds("start_timeout_s", self.start_timeout_s)
        sp, ulysses, ring = self.sequence_parallel_size, self.ulysses_size, self.ring_size
        if sp != "auto" and ulysses != "auto" and ring != "auto" and ulysses * ring != sp:
            raise SequenceParallelError(
                f"ulysses_size={ulysses} x ring_size={ring} = {ulysses * ring}, but sequence_parallel_size={sp}: "
                "their product must be sequence_parallel_size; leave one of the three 'auto'"
            )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all options."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> StrategyConfig:
        """Build from keywords, refusing an unknown one with the nearest known name."""
        known = cls.names()
        for name in options:
            if name not in known:
                raise SequenceParallelError(
                    f"unknown option {name!r} of the sequence_parallel strategy{closest(name, known)}; known: {', '.join(known)}"
                )
        return cls(**options)


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


def _check_switches(options: AttentionOptions) -> None:
    # A string is true whatever it says: "false" would switch an option on.
    for option in fields(options):
        given = getattr(options, option.name)
        if option.type == "bool" and not isinstance(given, bool):
            raise SequenceParallelError(f"{option.name}={given!r}: must be True or False")
        if option.type == "bool | None" and given is not None and not isinstance(given, bool):
            raise SequenceParallelError(f"{option.name}={given!r}: must be True, False or None")


def _check_name(option: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise SequenceParallelError(f"{option}={given!r}: must be one of {', '.join(known)}{closest(given, known)}")


def _check_seconds(option: str, given: float) -> None:
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if not is_number or not 0 < given < math.inf:
        raise SequenceParallelError(f"{option}={given!r}: must be positive, in seconds")


@dataclass(frozen=True)
class Degrees:
    """Sizes of dp x sp, and of sp = ring x ulysses where already given (0 = decided later from the heads)."""

    data_parallel_size: int
    sequence_parallel_size: int


def resolve_degrees(config: StrategyConfig, world_size: int) -> Degrees:
    """Fix dp and sp for a world, never altering a degree that was given.

    Raises:
        SequenceParallelError: the given degrees do not multiply to the world.
    """
    sp, dp = config.sequence_parallel_size, config.data_parallel_size
    ulysses, ring = config.ulysses_size, config.ring_size
    if sp == "auto" and ulysses != "auto" and ring != "auto":
        sp = ulysses * ring
    if sp == "auto":
        if dp == "auto":
            dp = 1
        sp = world_size // dp if world_size % dp == 0 else 0
    if dp == "auto":
        dp = world_size // sp if sp and world_size % sp == 0 else 0
    if dp * sp != world_size or dp == 0:
        divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
        raise SequenceParallelError(
            f"data_parallel_size={config.data_parallel_size} x sequence_parallel_size={config.sequence_parallel_size} "
            f"(ulysses_size={ulysses}, ring_size={ring}) do not multiply to the world of {world_size} ranks; "
            f"sequence_parallel_size can be one of {divisors} here, with data_parallel_size = {world_size} / sequence_parallel_size"
        )
    for name, part in (("ulysses_size", ulysses), ("ring_size", ring)):
        if part != "auto" and sp % part:
            raise SequenceParallelError(
                f"{name}={part} does not divide sequence_parallel_size={sp}; it can be one of {[d for d in range(1, sp + 1) if sp % d == 0]}"
            )
    return Degrees(dp, sp)


def resolve_split(
    config: StrategyConfig, sp: int, num_query_heads: int | None, placement: Placement | None = None
) -> tuple[int, int]:
    """Split sp into (ulysses, ring); "auto" takes Ulysses as far as the query heads allow, the rest ring.

    Over several nodes "auto" is what sends the fewest bytes between them, by the formula of `Placement.bytes_across_nodes`.

    Args:
        config: the options; degrees given are never altered.
        sp: sequence_parallel_size, resolved.
        num_query_heads: the smallest number of query heads among the model's attention layers, None if not known.
        placement: the ranks on their nodes, with the model's heads; None for one node.

    Raises:
        SequenceParallelError: Ulysses exceeds the query heads, or its stages do not divide them.
    """
    divisors = [d for d in range(1, sp + 1) if sp % d == 0]
    allowed = [d for d in divisors if num_query_heads is None or d <= num_query_heads]
    if config.ulysses_size != "auto":
        ulysses = config.ulysses_size
    elif config.ring_size != "auto":
        ulysses = sp // config.ring_size
    else:
        # Without the heads only a ring is safe: it serves any number of them.
        ulysses = 1 if num_query_heads is None else placement.best_ulysses_size(allowed) if placement else max(allowed)
    ring = sp // ulysses
    if num_query_heads is not None and ulysses > num_query_heads:
        raise SequenceParallelError(
            f"ulysses_size={ulysses} exceeds the model's {num_query_heads} query heads: a rank would hold no head; "
            f"with sequence_parallel_size={sp}, ulysses_size can be one of {allowed}, with ring_size = {sp} / ulysses_size"
        )
    if num_query_heads is not None:
        check_stages(config.ulysses_stages, num_query_heads, ulysses)
    return ulysses, ring


def needless_exchange(config: StrategyConfig, ulysses: int, placement: Placement) -> str | None:
    """Return one line where degrees that were given exchange heads across nodes and "auto" would not; else None."""
    given = [name for name in ("ulysses_size", "ring_size") if getattr(config, name) != "auto"]
    size = placement.sequence_parallel_size
    auto, ring = resolve_split(StrategyConfig(), size, placement.num_heads, placement)
    if not given or not placement.exchanges_across_nodes(ulysses) or placement.exchanges_across_nodes(auto):
        return None
    sent, least = (round(placement.bytes_across_nodes(each)) for each in (ulysses, auto))
    degrees = ", ".join(f"{name}={getattr(config, name)}" for name in given)
    return (
        f"{degrees} exchanges heads across nodes of {placement.ranks_per_node} ranks: {sent} bytes between nodes for each token and element of "
        f"a head; ulysses_size={auto}, ring_size={ring}, as 'auto' chooses, sends {least}"
    )


def resolve_shard_size(config: StrategyConfig, world_size: int) -> int:
    """Return over how many ranks FSDP2 splits the parameters."""
    size = world_size if config.shard_size == "auto" else config.shard_size
    if world_size % size:
        raise SequenceParallelError(
            f"shard_size={size} does not divide the world of {world_size} ranks; "
            f"it can be one of {[d for d in range(1, world_size + 1) if world_size % d == 0]}"
        )
    return size
