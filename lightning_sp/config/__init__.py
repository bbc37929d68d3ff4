"""The one table of options: names, defaults and rules. Reads nothing but its arguments; imports no torch.

`SequenceParallelStrategy`, `conf/strategy/*.yaml` and `--trainer.strategy.init_args.*` share these names, defaults and errors.
"""

from lightning_sp.config.attention import (
    ATTENTION_OPTIONS,
    KERNELS,
    RING_METHODS,
    RING_TRANSPORTS,
    AttentionKeywords,
    AttentionOptions,
    check_stages,
)
from lightning_sp.config.checks import Size
from lightning_sp.config.degrees import (
    Degrees,
    needless_exchange,
    ranks_without_heads,
    resolve_degrees,
    resolve_shard_size,
    resolve_split,
    without_effect,
)
from lightning_sp.config.memory import (
    CHECKPOINT_POLICIES,
    GATHER_DTYPES,
    GRADIENT_DTYPES,
    OFFLOAD_TIERS,
    STAGE_INPUTS,
    MemoryOptions,
    budget_percent,
    check_memory_device,
    every_nth,
)
from lightning_sp.config.strategy import BALANCES, StrategyConfig
from lightning_sp.config.tensor_parallel import TENSOR_PARALLEL_STYLES

__all__ = [
    "ATTENTION_OPTIONS",
    "BALANCES",
    "CHECKPOINT_POLICIES",
    "GATHER_DTYPES",
    "GRADIENT_DTYPES",
    "KERNELS",
    "OFFLOAD_TIERS",
    "RING_METHODS",
    "RING_TRANSPORTS",
    "STAGE_INPUTS",
    "TENSOR_PARALLEL_STYLES",
    "AttentionKeywords",
    "AttentionOptions",
    "Degrees",
    "MemoryOptions",
    "Size",
    "StrategyConfig",
    "budget_percent",
    "check_memory_device",
    "check_stages",
    "every_nth",
    "needless_exchange",
    "ranks_without_heads",
    "resolve_degrees",
    "resolve_shard_size",
    "resolve_split",
    "without_effect",
]
