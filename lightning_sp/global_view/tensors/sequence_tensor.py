"""A tensor that shows a whole sequence and holds this rank's part of it.

Functions of torch come to `__torch_function__`, and are looked up in the table of rules. Shape, dtype and device are those that one device
would see. What would reach a kernel without a rule is refused: the tensor has no memory of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import Self

from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.tensors.deferred import made
from lightning_sp.global_view.tensors.placement import Placement, Storage, gathered
from lightning_sp.global_view.tensors.traced import Metadata, placed_again
from lightning_sp.users_line import is_within, users_line


class GlobalTensor(Tensor):
    """A tensor without memory, whose functions the table of rules has. A subclass of `Tensor`, for models and losses test for that."""

    of_sequence: Storage
    # Calls in progress that the project's front end of the compiler made.
    captures: ClassVar[int] = 0

    @classmethod
    def without_memory(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Self:
        """Return a tensor of a shape, and no more."""
        made: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=False)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do what the table says of a function; a sharded weight among its arguments is made whole first, by its own class."""
        if len(types) > 1 and any(issubclass(each, DTensor) or hasattr(each, "is_term") for each in types):
            return NotImplemented
        if _is_below_autograd():
            raise _past_rules(func)
        given = dict(kwargs) if kwargs else {}
        # Most functions have it first; a list of tensors, `cat`'s, is searched.
        first = next((each for each in args if isinstance(each, GlobalTensor)), None)
        if first is None:
            first = next(each for each in tree_leaves((args, given)) if isinstance(each, GlobalTensor))
        return first.of_sequence.dispatch(func, types, args, given)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse a kernel that no rule stands before."""
        raise _past_rules(func)


def _is_below_autograd() -> bool:
    """Return whether a kernel is called for which autograd has done its part: a mode of torch, below a scripted function say, asks once more."""
    below = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)
    return below and torch.is_grad_enabled()


def _past_rules(func: Any) -> SequenceParallelError:
    if is_within("torch._functorch"):  # their levels are left by now
        return SequenceParallelError(
            f"global_view: torch.vmap or torch.func was handed a tensor of the sequence ({users_line()}; torch made {func} of it): these see "
            "one of many, or a level of derivatives, that a part of a sequence has not; write it with a dim more, as torch.einsum does, or hand "
            "the function lightning_sp.reductions.unshard(x)"
        )
    return SequenceParallelError(
        f"global_view: {func} was reached with a tensor of the sequence, past the functions of torch that have rules ({users_line()}; in a "
        "function of torch.jit.script or torch.jit.trace, or in compiled code, say): its gradient would be lost; write it with functions of "
        "torch, without the decorator, or hand it lightning_sp.reductions.unshard(x)"
    )


class SequenceTensor(GlobalTensor):
    """See the module.

    Args:
        local: this rank's part.
        placement: which dim is the sequence's.
    """

    placement: Placement
    _local: Tensor
    _whole: tuple[Tensor, int] | None

    @staticmethod
    def __new__(cls, local: Tensor, placement: Placement) -> SequenceTensor:
        """Return a tensor that shows the whole of which `local` is this rank's part."""
        assert local.shape[placement.dim] == placement.held, (local.shape, placement)
        shape = list(local.shape)
        shape[placement.dim] = placement.shown
        if placement.copied is not None and not placement.is_copy(local):
            placement = replace(placement, copied=None)  # computed of a copy
        made = cls.without_memory(shape, local.dtype, local.device)
        made._local, made.placement, made.of_sequence, made._whole = local, placement, placement.storage, None
        return made

    @property
    def local(self) -> Tensor:
        """This rank's part; of a copy its numbers as they are now."""
        if self.placement.copied is not None:
            self.placement.copied.renew()
        return self._local

    def __tensor_flatten__(self) -> tuple[list[str], Metadata]:
        """Tell a compiler what this is made of."""
        return ["local"], Metadata.of(self.placement)

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], metadata: Metadata, size: Any, stride: Any) -> SequenceTensor:
        """Return what a compiler traces in this tensor's place."""
        if not GlobalTensor.captures:
            raise SequenceParallelError(
                "global_view: code that you compiled is called with a tensor of the sequence, whose gradients a compiler does not see; leave it "
                "uncompiled and pass compile=True to the strategy, which compiles its blocks"
            )
        local = inner["local"]
        assert metadata.placement is not None
        return SequenceTensor(local, placed_again(local, metadata, size[metadata.placement.dim]))

    @classmethod
    def __metadata_guard__(cls, known: Metadata, given: Metadata) -> bool:
        """Return whether a tensor may take the graph of another."""
        return known == given

    def whole(self) -> Tensor:
        """Return what is shown, whole on every rank; differentiable. Communicates: as `placement.gathered`, once for what needs no gradient."""
        if self.local.requires_grad:
            return gathered(made(self.local), self.placement)
        # What is written to this rank's part, here or through a view of it, makes the whole another.
        version = self.local._version  # of the numbers, where they were not made yet
        if self._whole is None or self._whole[1] != version:
            self._whole = gathered(made(self.local), self.placement), version
        return self._whole[0].clone()

    def __copy__(self) -> SequenceTensor:
        """Return another tensor of the same memory, as `copy.copy` of any tensor does."""
        return SequenceTensor(copy(self.local), self.placement)

    def renew(self, local: Tensor) -> SequenceTensor:
        """Hold another local tensor of the same shape: what was written in place."""
        self._local, self._whole = local, None
        return self


def whole_of(value: Any) -> Any:
    """Return a structure with every sequence tensor of it whole."""
    return tree_map_only(SequenceTensor, lambda tensor: tensor.whole(), value)
