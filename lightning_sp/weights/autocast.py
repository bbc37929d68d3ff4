"""A whole weight that may hold its numbers rounded to bfloat16, and is a float32 one to all who see it: a tensor subclass.

Autocast rounds a linear layer's float32 weight to bfloat16 before each product. Rounded before the gather the numbers are the same, and half as
many bytes travel. Whether nothing else reads them is what this class knows:

    a cast to bfloat16                      gives a copy of the numbers, rounded
    views, `detach`                         give another such weight
    shape, dtype, zeros_like, ...           are those of float32
    anything else reads the numbers         noted while they are in float32, refused while they are rounded

Autograd stands above it: the graph, and the gradient in float32, are those of a plain weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_sp.errors import SequenceParallelError

ROUNDED = torch.bfloat16
_aten = torch.ops.aten
_VIEWS = {
    *(_aten.detach.default, _aten.alias.default, _aten.view.default, _aten._unsafe_view.default, _aten._reshape_alias.default),
    *(_aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.expand.default, _aten.as_strided.default),
    *(_aten.slice.Tensor, _aten.select.int, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int),
    *(_aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims),
}  # fmt: skip
# What takes no numbers of its tensor.
_SHAPED = {
    *(_aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default),
    *(_aten.new_empty.default, _aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default),
}  # fmt: skip
# Made of the others; within an operator they arrive as they are.
_COMPOSITE = {
    f"aten::{name}" for name in ("to", "reshape", "narrow", "chunk", "flatten", "unflatten", "view_as", "numpy_T", "mT")
}


@dataclass
class WeightReads:
    """How a weight was read on this rank; a class because its views tell it.

    Args:
        name: of the parameter.
        noted: whether reads are noted now.
        cast: whether it was cast.
        other: the first operation that read its float32 numbers; empty where none did.
    """

    name: str
    noted: bool = False
    cast: bool = False
    other: str = ""


class AutocastWeight(Tensor):
    """A weight of float32.

    Args:
        numbers: in float32, or rounded.
        reads: what is noted of them.
    """

    numbers: Tensor
    reads: WeightReads

    @staticmethod
    def __new__(cls, numbers: Tensor, reads: WeightReads) -> AutocastWeight:
        """Make one without memory of its own."""
        made: AutocastWeight = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,unused-ignore]
            cls, numbers.shape, strides=numbers.stride(), dtype=torch.float32, device=numbers.device, requires_grad=False
        )  # fmt: skip
        made.numbers, made.reads = numbers, reads
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment,unused-ignore]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override,unused-ignore]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation of torch's on the numbers, if it may have them."""
        first, rest, named = args[0] if args else None, args[1:], kwargs or {}
        if isinstance(first, cls):
            if func is _aten._to_copy.default and named.get("dtype") == ROUNDED:
                first.reads.cast |= first.reads.noted
                return func(first.numbers, **named)
            if func._schema.name in _COMPOSITE:
                return func.decompose(*args, **named)
            if func in _VIEWS:
                reads = first.reads
                return tree_map(lambda made: cls(made, reads), func(first.numbers, *rest, **named))
            if func in _SHAPED:
                return func(first.numbers, *rest, **named | {"dtype": named.get("dtype") or first.dtype})
        args, named = tree_map(lambda each: each.read(str(func)) if isinstance(each, cls) else each, (args, named))
        made = func(*args, **named)
        return first if isinstance(first, cls) and func._schema.is_mutable else made

    def read(self, how: str) -> Tensor:
        """Return the float32 numbers.

        Raises:
            SequenceParallelError: they are rounded.
        """
        reads = self.reads
        if self.numbers.dtype != self.dtype:
            raise SequenceParallelError(
                f"{reads.name} is read in {self.dtype} ({how}), and was gathered in {ROUNDED}: in the first backwards of this model every rank "
                "had seen that autocast casts it, and that nothing else reads it; set gather_dtype='float32' to gather all weights so that "
                "they may be read in any way, at twice the bytes"
            )
        if reads.noted:
            reads.other = reads.other or how
        return self.numbers

    # What reads memory beside torch's operations, kernels of Triton's by the first.

    def data_ptr(self) -> int:
        """Return where the numbers are."""
        return self.read("data_ptr").data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the numbers as an array that shares their memory."""
        return self.read("numpy").numpy(force=force)

    def tolist(self) -> Any:
        """Return the numbers."""
        return self.read("tolist").tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.read("deepcopy").detach().clone()
        memo[id(self)] = copied = torch.nn.Parameter(copied, self.requires_grad) if self.is_leaf else copied
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override,unused-ignore]
        return f"{type(self).__name__}({self.reads.name}, {tuple(self.shape)}, numbers in {self.numbers.dtype})"


def numbers_of(tensor: Tensor) -> Tensor:
    """Return a tensor as one that anything may read, a weight's numbers rounded where they are: for those who look at a step from outside."""
    return tensor.numbers.to(tensor.dtype) if isinstance(tensor, AutocastWeight) else tensor
