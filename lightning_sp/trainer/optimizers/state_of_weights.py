"""The state of an optimizer by the weight that a step sees: `optimizer.state[self.head.weight]`, also while that weight is whole.

Optimizers have states of shards. A module shows the whole weight, another tensor, while its unit of FSDP is gathered: within its forward, and
behind it where the unit stays so until its backward, as a head's does. A dictionary would answer for that tensor with an empty state, and
keep it.
"""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sp.parallelize import sharded_parameter


@contextmanager
def states_by_weight(optimizers: Sequence[Optimizer], root: nn.Module) -> Iterator[None]:
    """Let a step find the states of optimizers by whole weights, too.

    Args:
        optimizers: of shards, that do not step meanwhile.
        root: the model that was sharded.
    """
    # Some are made of others, and have no state of torch's.
    found = [(each, each.state) for each in optimizers if type(getattr(each, "state", None)) is defaultdict]
    shown: list[Any] = [StatesOfShards(state, root) for _, state in found]
    for (optimizer, _), states in zip(found, shown, strict=True):
        optimizer.state = states
    try:
        yield
    finally:
        for (optimizer, state), states in zip(found, shown, strict=True):
            if optimizer.state is states:
                optimizer.state = state


class StatesOfShards(UserDict[Tensor, Any]):
    """The very dictionary of an optimizer, which others may hold, too, by whole weights and by shards. A class because a step indexes it.

    Args:
        states: by the shards; written through to.
        root: whose whole weights are known.
    """

    def __init__(self, states: defaultdict[Tensor, Any], root: nn.Module) -> None:
        self.data, self._root = states, root  # not copied

    def _shard(self, key: Any) -> Any:
        """Return the shard of a whole weight; any other key as it is."""
        if not isinstance(key, Tensor) or key in self.data:
            return key
        shard = sharded_parameter(self._root, key)
        return key if shard is None else shard

    def __getitem__(self, key: Any) -> Any:
        return self.data[self._shard(key)]

    def __setitem__(self, key: Any, state: Any) -> None:
        self.data[self._shard(key)] = state

    def __delitem__(self, key: Any) -> None:
        del self.data[self._shard(key)]

    def __contains__(self, key: Any) -> bool:
        return self._shard(key) in self.data

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a state, or what is given where there is none."""
        return self.data.get(self._shard(key), default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Take a state out."""
        return self.data.pop(self._shard(key), *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return a state, or set what is given where there is none."""
        return self.data.setdefault(self._shard(key), default)

    def __reversed__(self) -> Iterator[Tensor]:
        return reversed(self.data)

    def keys(self) -> Any:
        """Return the shards."""
        return self.data.keys()

    def values(self) -> Any:
        """Return the states."""
        return self.data.values()

    def items(self) -> Any:
        """Return both."""
        return self.data.items()

    def copy(self) -> Any:
        """Return a plain copy."""
        return self.data.copy()

    __copy__ = copy

    def __or__(self, other: Any) -> Any:
        return self.data | dict(other)

    def __ror__(self, other: Any) -> Any:
        return dict(other) | self.data

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.data.items())
