"""How many tokens' logits are made at once."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_sp.loss.output_head.deferred_logits import is_deferred


class MostTokens(TorchDispatchMode):
    """Of how many tokens the largest tensor of a vocabulary is, weights aside.

    Args:
        vocabulary: its words.
        features: of a weight, which no logits have.
    """

    def __init__(self, vocabulary: int, features: int) -> None:
        super().__init__()
        self.vocabulary, self.features, self.tokens = vocabulary, features, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for each in tree_leaves(output):
            there = isinstance(each, Tensor) and each.device.type != "meta" and not is_deferred(each)
            if there and self.vocabulary in each.shape and self.features not in each.shape:
                self.tokens = max(self.tokens, each.numel() // self.vocabulary)
        return output
