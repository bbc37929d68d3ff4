"""Products of matrices whose results a checkpoint keeps: they cost more to compute again than what else a block computes, for each byte.

    (m, k) x (k, n)      2 k operations for each of m n numbers
    all else             a few, and each number is read and written once or twice

An H100 does 700 operations in bfloat16 in the time in which it reads or writes a byte, so that a product of k = 512 costs as much as reading
and writing its result. Those of a smaller k, of LoRA or of heads by hand say, are computed again. Source: selective checkpoints by cost,
Korthikanti et al., arXiv:2205.05198, section 5; the H100's datasheet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from lightning_sp.errors import SequenceParallelError

_aten = torch.ops.aten
# Of each operator the argument whose last dim is k.
_LEFT = {
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
    _aten._scaled_mm.default: 0,
    _aten._grouped_mm.default: 0,
}
_CONVOLUTION = _aten.convolution.default
_LEAST_ON_GPU, _LEAST = 512, 16
# There while nothing is kept.
_none: list[None] = []


def is_kept(operator: Any, args: Any) -> bool:
    """Return whether a checkpoint that keeps products keeps this one's result. Pure.

    Args:
        operator: of torch's, an overload.
        args: of the call.
    """
    if operator in _LEFT:
        left = args[_LEFT[operator]]
        size = left.shape[-1]
    elif operator is _CONVOLUTION:
        left = args[0]
        size = args[1][0].numel()
    else:
        return False
    if _none:
        return False
    # Of a tensor that stands for others nobody sees whether it is written to.
    return not is_traceable_wrapper_subclass(left) and bool(size >= least_inner_size(left.device))


def least_inner_size(device: torch.device) -> int:
    """Return the k from which on a product is kept on a device."""
    return _LEAST_ON_GPU if device.type == "cuda" else _LEAST


@contextmanager
def keeping_none() -> Iterator[None]:
    """Keep no product while this is entered: tiles of an MLP are there so that nothing wide is."""
    _none.append(None)
    try:
        yield
    finally:
        _none.pop()


class KeptResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The products of a block's forward while it is entered, the memory that they give, and whether it is written to.

    A count of writes does not tell: `linear` without a bias gives a tensor with a count of its own in the product's memory. And torch matches
    results by their number alone: behind a product that the backward does not run again, each would have the next one's.

    Args:
        of: the block, for a message.

    Attributes:
        storages: of the results.
        is_written: whether something was written to one.
        again: whether it is the backward's forward that is entered.
    """

    def __init__(self, of: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.is_written, self.again = False, False
        self._of, self._number = of, 0
        self._calls: list[tuple[Any, list[torch.Size]]] = []

    def __contains__(self, tensor: Any) -> bool:
        """Return whether a tensor is in the memory of a result."""
        return not is_traceable_wrapper_subclass(tensor) and _key(tensor) in self.storages

    def __enter__(self) -> Any:
        """Begin with the first product."""
        self._number = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Let go of the memory: from now on the backward's forwards are entered."""
        self.storages.clear()
        self.again = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LEFT or func is _CONVOLUTION:
            self._follow(func, [each.shape for each in args if isinstance(each, Tensor)])
        made = func(*args, **kwargs)
        if is_kept(func, args):
            self.storages[_key(made)] = made.untyped_storage()
        elif self.storages and func._schema.is_mutable:
            self.is_written |= any(_key(each) in self.storages for each in _written(func, args, kwargs))
        return made

    def _follow(self, operator: Any, shapes: list[torch.Size]) -> None:
        if not self.again:
            self._calls.append((operator, shapes))
            return
        if self._number >= len(self._calls) or self._calls[self._number] != (operator, shapes):
            raise SequenceParallelError(
                f"activation_checkpointing='matmuls': {self._of} runs other products of matrices in its backward than in its forward (a table "
                "that a cached function makes at its first call, say), and results are matched by their order; make it before, or use "
                "activation_checkpointing='selective'"
            )
        self._number += 1


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(operator: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    for number, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (
                each for each in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(each, Tensor)
            )
