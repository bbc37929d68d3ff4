"""From the degrees that were given to those of a world: data, sequence = ring x ulysses, tensor, and the shards of parameters."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_sp.config.attention import check_stages
from lightning_sp.config.strategy import StrategyConfig
from lightning_sp.errors import SequenceParallelError
from lightning_sp.nodes import Placement


@dataclass(frozen=True)
class Degrees:
    """Sizes of dp x sp x tp, and of sp = ring x ulysses where already given (0 = decided later from the heads)."""

    data_parallel_size: int
    sequence_parallel_size: int
    tensor_parallel_size: int = 1


def resolve_degrees(config: StrategyConfig, world_size: int) -> Degrees:
    """Fix dp and sp for a world, never altering a degree that was given. The ranks that split weights count as one.

    Raises:
        SequenceParallelError: the given degrees do not multiply to the world.
    """
    tensor, world_size = config.tensor_parallel_size, _without_tensor_parallel(config, world_size)
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
            f"(ulysses_size={ulysses}, ring_size={ring}) do not multiply to the world of {_ranks(world_size, tensor)}; "
            f"sequence_parallel_size can be one of {divisors} here, with data_parallel_size = {world_size} / sequence_parallel_size"
        )
    for name, part in (("ulysses_size", ulysses), ("ring_size", ring)):
        if part != "auto" and sp % part:
            raise SequenceParallelError(
                f"{name}={part} does not divide sequence_parallel_size={sp}; it can be one of {[d for d in range(1, sp + 1) if sp % d == 0]}"
            )
    return Degrees(dp, sp, tensor)


def _without_tensor_parallel(config: StrategyConfig, world_size: int) -> int:
    """Return how many ranks there would be with whole weights."""
    tensor = config.tensor_parallel_size
    if world_size % tensor:
        raise SequenceParallelError(
            f"tensor_parallel_size={tensor} does not divide the world of {world_size} ranks; "
            f"it can be one of {[d for d in range(1, world_size + 1) if world_size % d == 0]}"
        )
    return world_size // tensor


def _ranks(number: int, tensor: int) -> str:
    """Return the number of ranks with whole weights, in words."""
    return f"{number} ranks" if tensor == 1 else f"{number * tensor} ranks / tensor_parallel_size={tensor} = {number}"


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

    Ulysses degrees that are given may exceed the heads: those may be of attention over other things than the sequence, an image's patches say.
    Attention over the sequence refuses them itself.

    Raises:
        SequenceParallelError: the stages of Ulysses do not divide the heads.
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
    if num_query_heads is not None and ulysses <= num_query_heads:
        check_stages(config.attention.ulysses_stages, num_query_heads, ulysses)
    return ulysses, ring


def ranks_without_heads(ulysses: int, sp: int, num_query_heads: int) -> str | None:
    """Return one line where Ulysses exceeds the fewest heads that a model names; else None.

    Args:
        ulysses: resolved.
        sp: sequence_parallel_size, resolved.
        num_query_heads: the smallest number among the model's attention layers.
    """
    if ulysses <= num_query_heads:
        return None
    allowed = [d for d in range(1, num_query_heads + 1) if sp % d == 0]
    return (
        f"ulysses_size={ulysses} exceeds the {num_query_heads} query heads that the model names: attention of so few over the sequence is "
        f"refused, for a rank would hold no head; with sequence_parallel_size={sp}, ulysses_size can be one of {allowed}, with ring_size = "
        f"{sp} / ulysses_size"
    )


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


def without_effect(config: StrategyConfig, ulysses: int, ring: int) -> str | None:
    """Return one line on options of the attention that these degrees have no use for; None where there are none."""
    of_ring = {"ring_saves_kv": config.ring_saves_kv, "ring_method": config.ring_method == "all_gather"}
    of_ulysses = {"ulysses_stages": config.ulysses_stages > 1 and config.stage_inputs == "saved"}
    idle = [
        name
        for name, given in {**(of_ring if ring == 1 else {}), **(of_ulysses if ulysses == 1 else {})}.items()
        if given
    ]
    if not idle:
        return None
    options = ", ".join(f"{name}={getattr(config, name)!r}" for name in idle)
    return f"{options} without effect: at ulysses {ulysses} x ring {ring} nothing is sent that way"


def resolve_shard_size(config: StrategyConfig, world_size: int) -> int:
    """Return over how many ranks FSDP2 splits the parameters, or this rank's part of them."""
    world_size, tensor = _without_tensor_parallel(config, world_size), config.tensor_parallel_size
    size = world_size if config.shard_size == "auto" else config.shard_size
    if world_size % size:
        raise SequenceParallelError(
            f"shard_size={size} does not divide the world of {_ranks(world_size, tensor)}; "
            f"it can be one of {[d for d in range(1, world_size + 1) if world_size % d == 0]}"
        )
    return size
