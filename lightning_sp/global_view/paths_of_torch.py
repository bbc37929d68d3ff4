"""Functions of torch that take another path for a subclass of `Tensor`, or leave out what they were given when they ask its class.

torch.vmap                  calls kernels, past the functions that have rules
F.l1_loss                   does not tell of its weights
nn.TransformerEncoder       in an evaluation leaves padding out, which is 0 behind it on one device
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
import torch._functorch.apis as functorch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_sp.global_view.calls.bodies import body_of
from lightning_sp.global_view.exchange.movement import brought
from lightning_sp.global_view.tensors.placement import Placement, part_of
from lightning_sp.global_view.tensors.sequence_tensor import GlobalTensor, SequenceTensor


@contextmanager
def paths_as_on_one_device() -> Iterator[None]:
    """Let tensors of the sequence take the path that one device's take, while this is entered."""
    with ExitStack() as undo:
        for owner, name, changed in (
            (functorch, "vmap_impl", _mapped), (F, "l1_loss", _l1_loss), (nn.TransformerEncoder, "forward", _encoded),
        ):  # fmt: skip
            original: Any = vars(owner)[name]
            undo.callback(setattr, owner, name, original)
            setattr(owner, name, wraps(original)(_bound(changed, original)))
        yield


def _bound(changed: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, for a method's place too."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return changed(original, *args, **kwargs)

    return call


def _has_sequence(*values: Any) -> bool:
    return any(isinstance(each, GlobalTensor) for each in tree_leaves(values))


def _l1_loss(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    body = body_of(original) if kwargs.get("weight") is not None and _has_sequence(args, kwargs) else None
    return original(*args, **kwargs) if body is None else body(*args, **kwargs)


def _encoded(
    original: Callable[..., Any], self: nn.TransformerEncoder, src: Any, mask: Any = None, src_key_padding_mask: Any = None,
    is_causal: Any = None,
) -> Any:  # fmt: skip
    run = partial(original, self, src, mask, src_key_padding_mask, is_causal)
    if not isinstance(src, SequenceTensor) or not _leaves_padding_out(self, src, mask, src_key_padding_mask):
        return run()
    norm, self.norm = self.norm, None
    try:
        output = run()
    finally:
        self.norm = norm
    output = output.masked_fill(_is_padding(src_key_padding_mask)[..., None], 0.0)
    return output if norm is None else norm(output)


def _is_padding(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask == -torch.inf


def _leaves_padding_out(module: nn.TransformerEncoder, src: Tensor, mask: Any, padding: Any) -> bool:
    """Return whether one device's encoder computes rows of several lengths, as it decides it itself."""
    first: Any = module.layers[0]
    can = torch.backends.mha.get_fastpath_enabled() and getattr(module, "use_nested_tensor", False)
    if (
        not can
        or first.training
        or src.dim() != 3
        or padding is None
        or mask is not None
        or torch.is_autocast_enabled()
    ):
        return False
    if torch.is_grad_enabled() and any(each.requires_grad for each in [src, *first.parameters()]):
        return False
    return not getattr(module, "mask_check", True) or torch._nested_tensor_from_mask_left_aligned(
        src, ~_is_padding(padding)
    )


def _mapped(
    original: Callable[..., Any], function: Any, in_dims: Any, out_dims: Any, randomness: str, chunk_size: Any, *args: Any, **kwargs: Any
) -> Any:  # fmt: skip
    """Map a function over tokens, of which each rank has its own, or over another dim, one after the other."""
    as_it_is = partial(original, function, in_dims, out_dims, randomness, chunk_size)
    dims = (in_dims,) * len(args) if isinstance(in_dims, int) else in_dims
    if _has_sequence(args) and isinstance(dims, (tuple, list)) and _are_nested(args, dims):
        leaves, structure = tree_flatten(args)
        of_leaves = lambda *given, **named: function(*tree_unflatten(given, structure), **named)  # noqa: E731
        flat = tuple(dim for dim, each in zip(dims, args, strict=True) for _ in tree_leaves(each))
        return _mapped(original, of_leaves, flat, out_dims, randomness, chunk_size, *leaves, **kwargs)
    others = [each for each in args if not isinstance(each, Tensor)]
    is_flat = isinstance(dims, (tuple, list)) and all(each is None or isinstance(each, int) for each in dims)
    known = (
        is_flat and randomness == "error" and not _has_sequence(others, kwargs) and not torch.compiler.is_compiling()
    )
    if not known or not _has_sequence(args) or len(dims) != len(args):
        return as_it_is(*args, **kwargs)
    at = [None if dim is None else dim % each.dim() for dim, each in zip(dims, args, strict=True)]
    over_tokens = [
        each
        for dim, each in zip(at, args, strict=True)
        if isinstance(each, SequenceTensor) and dim == each.placement.dim
    ]
    if not over_tokens:
        return _one_by_one(function, args, at, out_dims, kwargs)
    own = over_tokens[0].placement
    local = _local_arguments(args, at, own)
    if local is None:
        return as_it_is(*args, **kwargs)
    leaves, structure = tree_flatten(as_it_is(*local, **kwargs))
    shown = [
        SequenceTensor(each, own.at(dim % each.dim()))
        for each, dim in zip(leaves, _dims_of(leaves, out_dims), strict=True)
    ]
    return tree_unflatten(shown, structure)


def _are_nested(args: Any, dims: Any) -> bool:
    """Return whether a dict or a list of tensors is mapped, all of them along one dim."""
    given = zip(dims, args, strict=True) if len(dims) == len(args) else ()
    return any(isinstance(dim, int) and isinstance(each, (dict, list, tuple)) for dim, each in given)


def _local_arguments(args: Any, dims: Any, own: Placement) -> list[Any] | None:
    """Return this rank's part of what is mapped over tokens; None where a sequence is not mapped so."""
    local: list[Any] = []
    for dim, each in zip(dims, args, strict=True):
        if isinstance(each, SequenceTensor):
            here = brought(each, own.storage)
            if dim != here.placement.dim or not here.placement.same_tokens(own) or own.outer * own.inner > 1:
                return None
            local.append(here.local)
        else:
            local.append(each if dim is None else part_of(each, own.at(dim)))
    return local


def _dims_of(leaves: Any, out_dims: Any) -> list[int]:
    return [out_dims] * len(leaves) if isinstance(out_dims, int) else list(out_dims)


def _one_by_one(function: Any, args: Any, dims: Any, out_dims: Any, kwargs: Any) -> Any:
    count = next(each.shape[dim] for dim, each in zip(dims, args, strict=True) if dim is not None)
    found = []
    for i in range(count):
        some = (each if dim is None else each.select(dim, i) for dim, each in zip(dims, args, strict=True))
        found.append(tree_flatten(function(*some, **kwargs)))
    columns = list(zip(*(each for each, _ in found), strict=True))
    stacked = [torch.stack(each, dim) for each, dim in zip(columns, _dims_of(columns, out_dims), strict=True)]
    return tree_unflatten(stacked, found[0][1])
