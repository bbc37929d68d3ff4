"""axolotl-ringmaster's Ulysses, as it is, in the model under FSDP2, blocks fully checkpointed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ringmaster
from ringmaster.config import RingmasterConfig
from ringmaster.strategies.ulysses import make_ulysses_attention
from torch import Tensor

from benchmarks.longest.contestants.hand_ulysses import checkpointed_step


def build(
    variant: str, problem: dict[str, Any], rank: int, world: int, begin_part: Callable[[str], None]
) -> Callable[[Tensor], Tensor]:
    """Return a step on a sequence that all ranks share."""
    config = RingmasterConfig(size=world, ulysses_size=world, ring_size=1, backend=ringmaster.Backend.AUTO)
    ringmaster.setup(config, num_kv_heads=8, device_type="cpu", inner_attn="sdpa")
    ulysses = make_ulysses_attention("sdpa")

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
        return ulysses(module, q, k, v, None, scaling=kwargs.get("scaling"), is_causal=True)

    return checkpointed_step(attention, problem, rank, world, begin_part)
