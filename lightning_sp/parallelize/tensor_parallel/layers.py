"""The forwards of split layers: what ranks say to each other before and after a layer of which each has a part of the weights.

    colwise    x whole        -> copy to the ranks -> x W[own outputs]      -> this rank's outputs
    rowwise    x[own inputs]  -> x W[own inputs] -> sum of the ranks, + bias -> whole outputs

A layer for several things (q, k and v) keeps its rows in the model's order, so the share of each part that a rank computes is exchanged for
each call: `packed.py`.

Weights are plain tensors here: FSDP2 gathers this rank's part of them. While the preflight runs a step as one device does, each layer gathers
the parts and runs as its class does, on whole inputs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.tensor_parallel.packed import dtype_of_call, own_attributes, packed_linear
from lightning_sp.parallelize.tensor_parallel.plan import SplitLayer
from lightning_sp.parameter_names import user_name

_ATTRIBUTE = "_lightning_sp_tensor_parallel"


class TensorParallel:
    """The split layers of a model; a class because a reference run switches them off.

    Args:
        group: the ranks that split the weights.

    Attributes:
        whole: layers run with all of their weights, gathered for each call: a reference run.
        inside: modules in whose forward, between a layer's own outputs and the next one's own inputs, tensors are this rank's part.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.whole = False
        self.inside: dict[str, None] = {}
        self._copied: tuple[weakref.ref[Tensor], int, weakref.ref[Tensor]] | None = None

    def inside_now(self) -> str:
        """Return the name of a module in which tensors are this rank's part; empty outside of one."""
        return "" if self.whole else next(iter(self.inside), "")

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a whole input for each rank's part of a layer: one copy for all layers of the same input, whose gradients are summed once."""
        if not (torch.is_grad_enabled() and tensor.requires_grad):
            return tensor
        if self._copied is not None:
            source, version, copy = self._copied[0](), self._copied[1], self._copied[2]()
            if source is tensor and version == tensor._version and copy is not None:
                return copy
        copy = comm.copy_to_ranks(tensor, self.group)
        self._copied = weakref.ref(tensor), tensor._version, weakref.ref(copy)
        return copy


def tensor_parallel(root: nn.Module) -> TensorParallel | None:
    """Return the split layers of a model; None where it has none."""
    found: TensorParallel | None = vars(root).get(_ATTRIBUTE)
    return found


def remember(root: nn.Module, state: TensorParallel) -> None:
    """Let `tensor_parallel` find the split layers of a model."""
    setattr(root, _ATTRIBUTE, state)


@contextmanager
def with_whole_weights(root: nn.Module) -> Iterator[None]:
    """Let split layers run as one device runs them: whole weights, gathered for each call, and whole inputs.

    Communicates: an all_gather of each weight over its ranks in the forward, one more in the backward.
    """
    state = tensor_parallel(root)
    if state is None:
        yield
        return
    before, state.whole = state.whole, True
    state.inside.clear()  # of a forward that has failed
    try:
        yield
    finally:
        state.whole = before


class SplitDims(NamedTuple):
    """Along which dim a layer's parameters are split, by name; those that are not among them are whole on every rank."""

    of: dict[str, int]

    @classmethod
    def of_layer(cls, layer: nn.Module, style: str, name: str) -> SplitDims:
        """Return those of a layer.

        Raises:
            SequenceParallelError: it is of a class whose weights are not known.
        """
        if style == "replicated_with_grad_allreduce":
            return cls({})
        outputs = {"Linear": 0, "Conv1D": 1}.get(_kind(layer))  # transformers' Conv1D has its inputs first
        if outputs is None:
            raise SequenceParallelError(
                f"{name} is a {type(layer).__module__}.{type(layer).__qualname__}, which the plan splits as {style!r}: which dim of its weights "
                "are outputs is known for nn.Linear and transformers' Conv1D, and of LoRA around them; leave it out of tensor_parallel_plan"
            )
        if style in ("colwise", "packed_colwise", "colwise_gather_output"):
            return cls({"weight": outputs, "bias": 0})
        return cls({"weight": 1 - outputs})


def _kind(layer: nn.Module) -> str:
    """Return the class whose forward a layer has."""
    forward: Any = type(layer).forward
    if forward is nn.Linear.forward:
        return "Linear"
    is_conv1d = forward.__module__ == "transformers.pytorch_utils" and forward.__qualname__ == "Conv1D.forward"
    return "Conv1D" if is_conv1d else ""


def split_forward(split_layer: SplitLayer, dims: SplitDims, state: TensorParallel) -> None:
    """Give a layer its forward on this rank's part of its weights.

    Args:
        split_layer: the layer.
        dims: of its parameters.
        state: of the model.
    """
    layer, style, inside = split_layer.module, split_layer.style, user_name(split_layer.inside)
    run = layer.forward
    own = partial(_of_own_outputs, run, layer, dims)
    packed = partial(packed_linear, layer, dims.of.get("weight", 0), split_layer.parts, state.group)
    runs: dict[str, Callable[[Tensor], Tensor]] = {
        "colwise": partial(_colwise, own, state, inside),
        "packed_colwise": partial(_colwise, packed, state, inside),
        "rowwise": partial(_rowwise, run, layer, state, inside),
        "colwise_gather_output": lambda x: comm.gather_parts(own(state.copied(x)), -1, state.group),
        "rowwise_split_input": lambda x: _summed(run, layer, state, comm.own_part(x, -1, state.group)),
        "replicated_with_grad_allreduce": partial(_with_summed_gradients, run, layer, state),
    }
    split = runs[style]

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs:
            raise SequenceParallelError(
                f"a layer of {inside} that is split over ranks ({style}) is called with more than its input: {len(args) + len(kwargs)} other "
                "arguments; leave it out of tensor_parallel_plan"
            )
        return _whole(run, layer, dims, state, x) if state.whole else split(x)

    layer.forward = forward


def split_numbers(module: nn.Module, own: Mapping[str, int], state: TensorParallel) -> None:
    """Let a module's forward read a rank's numbers of heads and features, in the place of the model's.

    Args:
        module: around split layers.
        own: as `own_attributes` takes them.
        state: of the model: a reference run reads the model's.
    """
    run = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if state.whole:
            return run(*args, **kwargs)
        values = own_attributes(module, own)
        before = {name: vars(module)[name] for name in values}
        vars(module).update(values)
        try:
            return run(*args, **kwargs)
        finally:
            vars(module).update(before)

    module.forward = functools.wraps(run)(forward)


def _of_own_outputs(run: Callable[[Tensor], Tensor], layer: nn.Module, dims: SplitDims, x: Tensor) -> Tensor:
    """Run a layer that counts its outputs, as transformers' Conv1D does, on this rank's."""
    if "nf" not in vars(layer):
        return run(x)
    outputs = layer._parameters["weight"].shape[dims.of["weight"]]  # type: ignore[union-attr]
    before, vars(layer)["nf"] = vars(layer)["nf"], outputs
    try:
        return run(x)
    finally:
        vars(layer)["nf"] = before


def _colwise(run: Callable[[Tensor], Tensor], state: TensorParallel, inside: str, x: Tensor) -> Tensor:
    state.inside[inside] = None
    return run(state.copied(x))


def _rowwise(
    run: Callable[[Tensor], Tensor], layer: nn.Module, state: TensorParallel, inside: str, x: Tensor
) -> Tensor:
    out = _summed(run, layer, state, x)
    if inside in state.inside:
        del state.inside[inside]
    else:
        state.inside.clear()  # its outputs' layers stand in another module
    return out


def _summed(run: Callable[[Tensor], Tensor], layer: nn.Module, state: TensorParallel, x: Tensor) -> Tensor:
    """Return whole outputs of this rank's inputs; the bias is added once."""
    bias = layer._parameters.get("bias")
    zeros = None if bias is None or _kind(layer) == "Linear" else torch.zeros_like(bias)
    with _parameters(layer, {} if bias is None else {"bias": zeros}):
        out = comm.sum_of_ranks(run(x), state.group)
    return out if bias is None else out + bias.to(out.dtype)


def _with_summed_gradients(
    run: Callable[[Tensor], Tensor], layer: nn.Module, state: TensorParallel, x: Tensor
) -> Tensor:
    own = {name: each for name, each in layer._parameters.items() if each is not None}
    with _parameters(layer, {name: comm.copy_to_ranks(each, state.group) for name, each in own.items()}):
        return run(x)


def _whole(
    run: Callable[[Tensor], Tensor], layer: nn.Module, dims: SplitDims, state: TensorParallel, x: Tensor
) -> Tensor:
    """Run a layer as its class does. What the backward needs of whole weights is gathered again there, one layer at a time."""
    own = {name: each for name, each in layer._parameters.items() if each is not None and name in dims.of}

    def gathered(name: str, dtype: torch.dtype) -> Tensor:
        return comm.gather_parts(own[name].to(dtype), dims.of[name], state.group)

    wholes = {name: gathered(name, dtype_of_call(each)) for name, each in own.items()}
    by_storage = {each.untyped_storage()._cdata: name for name, each in wholes.items()}

    def pack(saved: Tensor) -> Any:
        name = by_storage.get(saved.untyped_storage()._cdata)
        return saved if name is None else (name, saved.dtype, (saved.size(), saved.stride(), saved.storage_offset()))

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        name, dtype, geometry = packed
        with torch.no_grad():
            return gathered(name, dtype).as_strided(*geometry)

    with _parameters(layer, wholes), saved_tensors_hooks(pack, unpack):
        return run(x)


@contextmanager
def _parameters(layer: nn.Module, others: dict[str, Any]) -> Iterator[None]:
    """Let a layer have other tensors for its parameters."""
    before = {name: layer._parameters[name] for name in others}
    layer._parameters.update(others)
    try:
        yield
    finally:
        layer._parameters.update(before)
