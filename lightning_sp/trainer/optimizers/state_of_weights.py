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
    """Let the states of optimizers be found by whole weights, too. To be called before each step: what loads a state makes a new dictionary.

    Args:
        optimizers: of shards.
        root: the model that was sharded.
    """
    for optimizer in optimizers:
        # Some are made of others, and have no state of torch's.
        if type(getattr(optimizer, "state", None)) is defaultdict:
            optimizer.state = StatesOfShards(dict, optimizer.state, root)


class StatesOfShards(defaultdict[Tensor, Any]):
    """The states of shards. A class because torch's optimizers index theirs; what is made of it, a copy or a pickle, knows shards alone.

    Args:
        factory: of a state.
        states: by the shards.
        root: whose whole weights are known; None for none.
    """

    def __init__(self, factory: Any = dict, states: Any = (), root: nn.Module | None = None) -> None:
        super().__init__(factory, states)
        self._root = (lambda: None) if root is None else weakref.ref(root)

    def _shard(self, key: Any) -> Any:
        """Return the shard of a whole weight; any other key as it is."""
        root = self._root()
        if root is None or not isinstance(key, Tensor) or super().__contains__(key):
            return key
        shard = sharded_parameter(root, key)
        return key if shard is None else shard

    def __missing__(self, key: Any) -> Any:
        shard = self._shard(key)
        return super().__missing__(key) if shard is key else self[shard]

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(self._shard(key))

    def __setitem__(self, key: Any, state: Any) -> None:
        super().__setitem__(self._shard(key), state)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(self._shard(key))

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a state, or what is given where there is none."""
        return super().get(self._shard(key), default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Take a state out."""
        return super().pop(self._shard(key), *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return a state, or set what is given where there is none."""
        return super().setdefault(self._shard(key), default)

    def __reduce__(self) -> Any:
        return defaultdict, (self.default_factory,), None, None, iter(self.items())
