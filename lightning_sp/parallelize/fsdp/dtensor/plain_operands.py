"""Plain tensors beside sharded ones, in a hook or an optimizer, which torch refuses: `gradient.add_(noise)`, `torch.mul(weight.data, mask)`.

A plain tensor that all ranks hold alike is whole on each of them, and each shard meets its part of it. One that differs is refused.
One that is written to, `own.add_(gradient)`, is whole and stays so: what it is given is gathered.

What DTensor has no rule for, `weight[weight > 0]`, `gradient.tolist()`, `torch.unique(weight)`, is done to whole tensors, and gives plain ones.
A write that it has none for, of one that is whole to a weight's only row, `head.bias.copy_(average)`, is made to the whole, and kept in shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.fsdp.dtensor.behind_runs import together
from lightning_sp.parallelize.fsdp.dtensor.empty_parts import fails_on_empty_parts


class LearnsOutsideError(SequenceParallelError):
    """A weight that is sharded outside of a step meets a tensor that needs a gradient."""


# Odd numbers without a pattern, of SplitMix64.
_OF_BITS, _OF_PLACES = -0x61C8864680B583EB, -0x40A7B892E31B1A47
_REFUSED = "mixed torch.Tensor and DTensor"  # torch's words, before anything is done
_NO_RULE = (
    "Sharding propagation failed",
    "does not have a sharding strategy registered",
    "is not supported for tensor subclasses",
    "invalid python storage",
)
# Of a plain index, which a shard would be read with as if it were the whole.
_INDEXED = {"gather", "take", "take_along_dim", "index_add", "index_copy", "index_fill", "scatter", "scatter_add"}
# Of plain activations they give plain ones; DTensor's own convolution makes a part of the channels the whole.
_LAYERS = {
    *(
        "linear",
        "bilinear",
        "embedding",
        "embedding_bag",
        "layer_norm",
        "rms_norm",
        "group_norm",
        "batch_norm",
        "instance_norm",
        "prelu",
    ),
    *(
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "gru",
        "lstm",
        "rnn_tanh",
        "rnn_relu",
    ),
}
# DTensor's own has a sum of its rows that no reduction of them can finish.
_LOOK_UPS = {"embedding", "embedding_bag"}
# Of one tensor: `parameter.grad`, `parameter.grad = None`. An optimizer asks for some ten of each of its parameters.
_ATTRIBUTES = {"__get__", "__set__", "is_complex"}
_TRIALS: list[None] = []  # in progress, in which torch's own words are asked for


def beside_sharded(_: type, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Call a function of torch with sharded tensors, and with plain ones beside them. Every rank must call it.

    Communicates: where it is given a plain one, an all_reduce of 16 bytes for each.

    Raises:
        SequenceParallelError: one that differs between ranks; on all of them.
    """
    if getattr(function, "__name__", "") in _ATTRIBUTES:
        try:
            return torch._C._disabled_torch_function_impl(function, types, args, kwargs or {})
        except (RuntimeError, NotImplementedError):  # one that computes, `weight.mT`, may have no rule: see below
            pass
    kwargs = kwargs or {}
    if isinstance(out := kwargs.get("out"), DTensor):  # `torch.eye(5, 3, out=weight)` would make each shard the whole
        found = function(*args, **{name: value for name, value in kwargs.items() if name != "out"})
        return out.copy_(found.detach())
    with torch._C.DisableTorchFunctionSubclass():
        if (
            getattr(function, "__name__", "") == "equal"
            and not kwargs
            and all(isinstance(each, DTensor) for each in args)
        ):
            return _equal(*args)
        is_indexed = getattr(function, "__name__", "") in _INDEXED and not _learns(args, kwargs)
        fails = fails_on_empty_parts(function, args, kwargs)
        if fails and len(each_alone := _listed(function, args)) > 1:  # not all of a model whole at once
            return [beside_sharded(_, function, types, ([each], *args[1:]), kwargs)[0] for each in each_alone]
        _count_writes(function, args)
        # torch takes one plain number for one that is whole on each rank, writes to it what is a shard's, and fails behind that.
        writes_to_number = any(_is_plain(each) and each.numel() == 1 for each in _written_to(function, args, kwargs))
        if is_indexed or fails or writes_to_number:
            return together(_of_wholes, function, args, kwargs)
        if getattr(function, "__name__", "") in _LOOK_UPS and any(map(_is_plain, tree_leaves([args, kwargs]))):
            return together(_looked_up, function, args, kwargs)
        try:
            return function(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            instead = _instead(function, args, kwargs, str(error))
            if instead is None:
                raise
        return together(instead)


def _equal(one: DTensor, other: DTensor) -> bool:
    """As `torch.equal` on one device: DTensor brings one to the placements of the other first, which one of fewer dims cannot have."""
    if one is other or one.shape != other.shape:
        return one is other
    if one.device_mesh == other.device_mesh and one.placements == other.placements:
        return torch.equal(one, other)
    return together(_of_wholes, torch.equal, (one, other), {})  # type: ignore[no-any-return]


def _instead(function: Callable[..., Any], args: Any, kwargs: Any, why: str) -> Callable[[], Any] | None:
    """Return what gives what a function would give of whole tensors, by why DTensor refuses it; None where nothing does."""
    written = _written_to(function, args, kwargs)
    to_plain = [_is_plain(each) for each in written]
    given = tree_leaves([args, kwargs])
    plain_learns = torch.is_grad_enabled() and any(_is_plain(each) and each.requires_grad for each in given)
    if _REFUSED in why:
        if plain_learns:
            return None if _TRIALS else partial(_refuse_to_learn, function, given)
        if not any(to_plain):
            is_layer = getattr(function, "__name__", "") in _LAYERS and not _learns(args, kwargs)
            return partial(_of_wholes if is_layer else _of_replicated, function, args, kwargs)
    elif not any(words in why for words in _NO_RULE):
        return None
    if _TRIALS or plain_learns:
        return None
    if not all(to_plain):
        is_home = not any(to_plain) and not _learns(args, kwargs)
        return partial(_write_to_wholes, function, args, kwargs) if is_home else None
    if getattr(function, "__name__", "") == "__deepcopy__":
        return lambda: args[0].detach().clone()
    return partial(_of_wholes, function, args, kwargs)


def _listed(function: Callable[..., Any], args: Any) -> list[Any]:
    """Return the tensors of which a function takes a list, and gives one of results; none for another one."""
    takes = getattr(function, "__name__", "").startswith("_foreach_") and isinstance(args[0], (list, tuple))
    return [*args[0]] if takes else []


def _count_writes(function: Callable[..., Any], args: Any) -> None:
    """Count a write to each of a list's sharded tensors (`torch._foreach_mul_`, of which `clip_grad_value_` is made): torch counts none."""
    if args and isinstance(args[0], (list, tuple)) and getattr(function, "__name__", "").endswith("_"):
        increment_version([each for each in args[0] if isinstance(each, DTensor)])


def _of_replicated(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function with plain tensors as ones that are whole on every rank; with whole ones where DTensor has no rule, a mask as index."""
    like = next(each for each in tree_leaves([args, kwargs]) if isinstance(each, DTensor))
    replicated = tree_map(lambda value: _replicated(value, like), [args, kwargs])
    try:
        found = function(*replicated[0], **replicated[1])
        return found if _learns(args, kwargs) else _plain_activations(found, args, kwargs)
    except (RuntimeError, NotImplementedError) as error:
        instead = None if _REFUSED in str(error) else _instead(function, args, kwargs, str(error))
        if instead is None:
            raise
    return instead()


def _looked_up(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Look up rows of a whole weight; with a gradient they are to be the same ones on all ranks, each of which has that of its part."""
    given = tree_leaves([args, kwargs])
    like = next(each for each in given if isinstance(each, DTensor))
    for each in filter(_is_plain, given if _learns(args, kwargs) else []):
        check_alike(each, like)
    return _of_wholes(function, args, kwargs)


def _refuse_to_learn(function: Callable[..., Any], given: list[Any]) -> None:
    weights = [each for each in given if isinstance(each, DTensor)]
    sharded = next((each for each in weights if each.is_leaf), weights[0])
    raise LearnsOutsideError(
        f"{getattr(function, '__name__', function)} of a weight of shape {tuple(sharded.shape)}, which is sharded outside of a step, meets a "
        "tensor that needs a gradient: no rank would add the weight's to the others'; what a hook looks at is computed under "
        "torch.no_grad(), and what is to be learned in training_step"
    )


def _plain_activations(found: Any, args: Any, kwargs: Any) -> Any:
    """Return whole what has the shape of no sharded tensor: logits of a layer that a hook calls, whose places the next layer looks up.

    What has the shape of a weight or a gradient stays sharded: it is written back to it.
    """
    shapes = {each.shape for each in tree_leaves([args, kwargs]) if isinstance(each, DTensor)}
    return tree_map(
        lambda value: value.full_tensor() if isinstance(value, DTensor) and value.shape not in shapes else value, found
    )


def _learns(args: Any, kwargs: Any) -> bool:
    given = tree_leaves([args, kwargs]) if torch.is_grad_enabled() else []
    return any(isinstance(each, Tensor) and each.requires_grad for each in given)


def _of_wholes(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function with what is sharded whole, on every rank."""
    args, kwargs = tree_map(lambda value: value.full_tensor() if isinstance(value, DTensor) else value, [args, kwargs])
    return function(*args, **kwargs)


def _write_to_wholes(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function that writes to sharded tensors with whole ones, on every rank, each of which keeps its shard of what was written."""
    if (number := len(_listed(function, args))) > 1:  # not all of a model whole at once
        for place in range(number):
            is_list = [isinstance(each, (list, tuple)) and len(each) == number for each in args]
            alone = [[each[place]] if listed else each for each, listed in zip(args, is_list, strict=True)]
            beside_sharded(DTensor, function, (), alone, kwargs)
        return None
    given = tree_leaves([args, kwargs])
    sharded = [each for each in given if isinstance(each, DTensor)]
    for each in filter(_is_plain, given):
        check_alike(each, sharded[0])
    wholes = {id(each): each.full_tensor().clone() for each in sharded}
    whole_args, whole_kwargs = tree_map(lambda value: wholes.get(id(value), value), [args, kwargs])
    function(*whole_args, **whole_kwargs)
    written = _written_to(function, args, kwargs)
    for tensor in (each for each in written if isinstance(each, DTensor)):
        # src_data_rank=None: every rank holds the whole and keeps its part.
        shard = distribute_tensor(wholes[id(tensor)], tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor._local_tensor.copy_(shard._local_tensor)
    return written[0]


@contextmanager
def as_torch_does() -> Iterator[None]:
    """Let what DTensor has no rule for fail in torch's words: an optimizer whose operations are none of shards steps whole weights."""
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


def check_alike(value: Any, like: DTensor) -> None:
    """Refuse a plain tensor that differs between ranks, beside a sharded one. Every rank must call it.

    Communicates: an all_reduce of 16 bytes.

    Raises:
        SequenceParallelError: it differs; on all ranks.
    """
    if not comm.all_equal(_digest(value).to(like.device)):
        raise SequenceParallelError(
            f"a tensor of shape {tuple(value.shape)} that differs between ranks meets a sharded one of shape {tuple(like.shape)}: each rank "
            "would go on with its own part of it; draw it as the sharded one (torch.randn_like(gradient)), or by a generator with one seed, or "
            "make it of what all ranks know"
        )


def shard_plain_gradients(optimizer: Any, *_: Any) -> None:
    """Give sharded parameters their part of plain gradients that were assigned to them: an optimizer makes its state of these.

    Communicates: an all_reduce of 16 bytes for each of them. Every rank must call it.

    Raises:
        SequenceParallelError: one that differs between ranks; on all of them.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"] if isinstance(each, DTensor)]
    with torch._C.DisableTorchFunctionSubclass():
        gradients = [each.grad for each in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None or isinstance(gradient, DTensor):
            continue
        check_alike(gradient, parameter)
        # src_data_rank=None: every rank holds the whole and keeps its part.
        parameter.grad = distribute_tensor(
            gradient.detach().reshape(parameter.shape), parameter.device_mesh, parameter.placements, src_data_rank=None
        )


def _replicated(value: Any, like: DTensor) -> Any:
    """Return a plain tensor as one that is whole on every rank of a sharded one's mesh; anything else as it is."""
    if not _is_plain(value) or value.numel() == 1:
        return value
    check_alike(value, like)
    return DTensor.from_local(value, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)  # type: ignore[no-untyped-call,unused-ignore]


def _digest(value: Tensor) -> Tensor:
    """Return a number, (1,) of int64, that differs, almost surely, where elements do."""
    bits = value.detach().reshape(-1).to(torch.float64).view(torch.int64)
    mixed = bits * _OF_BITS + torch.arange(len(bits), device=bits.device) * _OF_PLACES
    return (mixed ^ (mixed >> 32)).sum().reshape(1)
