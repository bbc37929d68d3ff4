"""A call of a function of torch with tensors of the sequence among its arguments: what a rule of the table gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_sp.global_view.tensors.placement import Placement
from lightning_sp.global_view.tensors.sequence_tensor import GlobalTensor, SequenceTensor

# Of one tensor of all pairs of tokens, scores say, on a rank: 1 GiB in float32.
MOST_NUMBERS = 2**28


class _NoRule:
    """What a rule gives for arguments that it does not know."""


NO_RULE: Any = _NoRule()


@dataclass(frozen=True, eq=False)
class Call:
    """One call.

    Args:
        name: of the function, without the underscores of an operator: `add` for `a + b`.
        function: as torch hands it over.
        args: as the user gave them.
        kwargs: likewise.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def tensors(self) -> list[SequenceTensor]:
        """The tensors of the sequence among the arguments."""
        return [each for each in _leaves((*self.args, *self.kwargs.values())) if isinstance(each, SequenceTensor)]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument that may be given by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def on_locals(self) -> Any:
        """Call the function with this rank's part of each tensor."""
        return self.changed(_local_of)

    def on_wholes(self) -> Any:
        """Call the function with each tensor whole."""
        return self.changed(lambda value: value.whole() if isinstance(value, SequenceTensor) else value)

    def copied(self) -> Call:
        """Return the call with copies of its tensors, without a history: what is written to them is written to nothing else."""
        args = tuple(mapped(each, _copy_of) for each in self.args)
        return replace(self, args=args, kwargs={name: mapped(each, _copy_of) for name, each in self.kwargs.items()})

    def changed(self, change: Callable[[Any], Any]) -> Any:
        """Call the function with changed arguments, those in lists, tuples and mappings too."""
        args = [mapped(each, change) for each in self.args]
        return self.function(*args, **{name: mapped(each, change) for name, each in self.kwargs.items()})


def _local_of(value: Any) -> Any:
    return value.local if isinstance(value, SequenceTensor) else value


def _copy_of(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values, those in lists and tuples too. Written out for what runs for each function that is called."""
    for each in values:
        if isinstance(each, (list, tuple)):
            yield from _leaves(each)
        else:
            yield each


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value changed, or each in a list or tuple."""
    if isinstance(value, list):  # a compiler's own kind of list among them
        return [mapped(each, change) for each in value]
    return tuple(mapped(each, change) for each in value) if type(value) is tuple else change(value)


Rule = Callable[[Call], Any]


def named(names: str, rule: Rule) -> dict[str, Rule]:
    """Return a rule for each of some names, given with spaces between."""
    return dict.fromkeys(names.split(), rule)


def placed(result: Any, placement: Placement) -> Any:
    """Return each tensor of a local result as one of the sequence."""
    if isinstance(result, Tensor):
        return SequenceTensor(result, placement)
    return tree_map_only(Tensor, lambda tensor: SequenceTensor(tensor, placement), result)


def is_sequence(value: Any) -> bool:
    """Return whether a value is a tensor of the sequence."""
    return isinstance(value, SequenceTensor)


def is_plain(value: Any) -> bool:
    """Return whether a value is a tensor that is whole on every rank."""
    return isinstance(value, Tensor) and not isinstance(value, GlobalTensor)


def dims_of(dim: Any, ndim: int) -> list[int]:
    """Return dims, from 0, of an argument that is one, several or None for all."""
    given = range(ndim) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    return [each % ndim for each in given]


def whole_is_small(tensor: SequenceTensor) -> bool:
    """Return whether a tensor has few numbers for each token, or one token: then it may be whole on every rank for a moment."""
    placement = tensor.placement
    if placement.shown == 1:
        return True
    per_token = tensor.local.numel() // max(1, placement.storage.local_tokens)
    rows = max(1, placement.outer * (tensor.local.shape[0] if placement.dim > 0 else 1))
    return per_token <= rows * 4 or (not tensor.local.is_floating_point() and per_token <= rows * 64)


def writes(function: Any) -> bool:
    """Return whether a function writes into its first argument, by its name."""
    return writes_by_name(function.__name__)


def writes_by_name(name: str) -> bool:
    """Return whether a function of a name writes into its first argument."""
    return name in _AUGMENTED or (name.endswith("_") and not name.startswith("__"))


_AUGMENTED = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "pow", "floordiv", "div")}
