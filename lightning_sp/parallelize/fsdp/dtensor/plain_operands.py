"""Plain tensors beside sharded ones, in a hook or an optimizer, which torch refuses: `gradient.add_(noise)`, `torch.mul(weight.data, mask)`.

A plain tensor that all ranks hold alike is whole on each of them, and each shard meets its part of it. One that differs is refused.
One that is written to, `own.add_(gradient)`, is whole and stays so: what it is given is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError

# Odd numbers without a pattern, of SplitMix64.
_OF_BITS, _OF_PLACES = -0x61C8864680B583EB, -0x40A7B892E31B1A47
_REFUSED = "mixed torch.Tensor and DTensor"  # torch's words, before anything is done
_TRIALS: list[None] = []  # in progress, of what writes to plain tensors


def beside_sharded(_: type, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Call a function of torch with sharded tensors, and with plain ones beside them. Every rank must call it.

    Communicates: where it is given a plain one, an all_reduce of 16 bytes for each.

    Raises:
        SequenceParallelError: one that differs between ranks; on all of them.
    """
    kwargs = kwargs or {}
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            given = tree_leaves([args, kwargs])
            learns = any(_is_plain(each) and each.requires_grad for each in given)
            writes = _written_to(function, args, kwargs)
            is_written = any(map(_is_plain, writes))
            if _REFUSED not in str(error) or learns or (is_written and (_TRIALS or not all(map(_is_plain, writes)))):
                raise
        if is_written:
            args, kwargs = tree_map(
                lambda value: value.full_tensor() if isinstance(value, DTensor) else value, [args, kwargs]
            )
            return function(*args, **kwargs)
        like = next(each for each in given if isinstance(each, DTensor))
        args, kwargs = tree_map(lambda value: _replicated(value, like), [args, kwargs])
        return function(*args, **kwargs)


@contextmanager
def writes_to_plain_refused() -> Iterator[None]:
    """Let writes of sharded tensors to plain ones fail in torch's words: an optimizer whose state is none of shards steps whole weights."""
    _TRIALS.append(None)
    try:
        yield
    finally:
        _TRIALS.pop()


def _written_to(function: Callable[..., Any], args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that a function writes to."""
    name = str(getattr(function, "__name__", ""))
    in_place = name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    written = tree_leaves([args[0] if in_place and args else None, kwargs.get("out")])
    return [each for each in written if isinstance(each, Tensor)]


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def _replicated(value: Any, like: DTensor) -> Any:
    """Return a plain tensor as one that is whole on every rank of a sharded one's mesh; anything else as it is."""
    if not _is_plain(value) or value.numel() == 1:
        return value
    if not comm.all_equal(_digest(value).to(like.device)):
        raise SequenceParallelError(
            f"a tensor of shape {tuple(value.shape)} that differs between ranks meets a sharded one of shape {tuple(like.shape)}: each rank "
            "would go on with its own part of it; draw it as the sharded one (torch.randn_like(gradient)), or by a generator with one seed, or "
            "make it of what all ranks know"
        )
    return DTensor.from_local(value, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)  # type: ignore[no-untyped-call,unused-ignore]


def _digest(value: Tensor) -> Tensor:
    """Return a number, (1,) of int64, that differs, almost surely, where elements do."""
    bits = value.detach().reshape(-1).to(torch.float64).view(torch.int64)
    mixed = bits * _OF_BITS + torch.arange(len(bits), device=bits.device) * _OF_PLACES
    return (mixed ^ (mixed >> 32)).sum().reshape(1)
