"""The state of an optimizer by the weight that a step sees: `optimizer.state[self.head.weight]`, also while that weight is whole.

Optimizers have states of shards. A module shows the whole weight, another tensor, while its unit of FSDP is gathered: within its forward, and
behind it where the unit stays so until its backward, as a head's does. A dictionary would answer for that tensor with an empty state, and
keep it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sp.parallelize import sharded_parameter


def show_states_by_weight(optimizers: Iterable[Optimizer], root: nn.Module) -> None:
    """Let the states of optimizers be found by whole weights, too, from now on and behind each `load_state_dict`.

    Args:
        optimizers: of shards.
        root: the model that was sharded.
    """
    for optimizer in optimizers:
        # Some are made of others, and have no state of torch's.
        if type(getattr(optimizer, "state", None)) is not defaultdict:
            continue
        optimizer.state = _States(optimizer.state, root)
        optimizer.register_load_state_dict_post_hook(lambda each: _again(each, root))


def _again(optimizer: Optimizer, root: nn.Module) -> None:
    if type(optimizer.state) is defaultdict:
        optimizer.state = _States(optimizer.state, root)


class _States(defaultdict[Tensor, Any]):
    """The states of shards. A class because torch's optimizers index theirs; copies and pickles of it are plain ones."""

    def __init__(self, states: dict[Tensor, Any], root: nn.Module) -> None:
        super().__init__(dict, states)
        self._root = weakref.ref(root)

    def _shard(self, key: Any) -> Any:
        """Return the shard of a whole weight, None for what is none."""
        root = self._root()
        return sharded_parameter(root, key) if root is not None and isinstance(key, Tensor) else None

    def __missing__(self, key: Any) -> Any:
        shard = self._shard(key)
        return super().__missing__(key) if shard is None else self[shard]

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(key) or super().__contains__(self._shard(key))

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a state, or what is given where there is none."""
        shard = key if super().__contains__(key) else self._shard(key)
        return super().get(shard, default)

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())
