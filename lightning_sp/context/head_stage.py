"""A stage of heads in progress: what an attention call does in a module whose heads are computed in stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lightning_sp.attention.spec.codec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class HeadStage:
    """What stands for the operator while a module's forward runs for some of its heads.

    Args:
        operator: is given q, k, v and the rest; it returns the out of all heads, or ends the forward.
        is_first: this call alone counts as the module's.
    """

    operator: Callable[[Tensor, Tensor, Tensor, AttentionSpec], Tensor]
    is_first: bool = False
