"""Tensor parallelism of a model: its layers split by a plan, its parameters over one more axis of the mesh, before all else is done to it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.tensor_parallel.layers import (
    SplitDims,
    TensorParallel,
    remember,
    split_forward,
    split_numbers,
)
from lightning_sp.parallelize.tensor_parallel.packed_layers import packed_layers
from lightning_sp.parallelize.tensor_parallel.parameters import check_divides, split_parameters
from lightning_sp.parallelize.tensor_parallel.plan import PACKED, SplitLayer
from lightning_sp.parallelize.tensor_parallel.vocabulary import split_vocabulary, split_words
from lightning_sp.parameter_names import shown, user_name
from lightning_sp.weights.quantized import quantized_parameters

# torch's logger that says, of each mesh once, that to make a tensor of two axes whole takes a message on each. So it is meant.
_REDISTRIBUTION = "torch.distributed.tensor._redistribute"

_COLUMNS, _ROWS = ("colwise", PACKED, "colwise_gather_output"), ("rowwise", "rowwise_split_input")


def check_split(root: nn.Module, given: Mapping[str, str] | None, size: int, heads: Mapping[str, int]) -> bool:
    """Refuse a model that cannot be split over so many ranks, before anything of it is changed. Equal on all ranks.

    Args:
        root: the LightningModule.
        given: the plan; None for the model's own.
        size: ranks that split it.
        heads: numbers of heads of its attention, by what they are.

    Returns:
        Whether each rank has heads of its own.

    Raises:
        SequenceParallelError: a plan is missing, a layer or the heads have no equal parts, or it has quantized weights.
    """
    if quantized := quantized_parameters(root):
        raise SequenceParallelError(
            f"tensor_parallel_size={size} with {len(quantized)} quantized weights ({shown(quantized)}): what a part of their packed numbers is, "
            "is not known; use weights of float32 or bfloat16, or sequence_parallel_size alone"
        )
    found, _ = packed_layers(root, given, size)
    if found.splits_heads:
        for kind, number in heads.items():
            if number % size:
                raise SequenceParallelError(
                    f"tensor_parallel_size={size} does not divide the model's {number} {kind} heads, of which each rank has its own; it can be "
                    f"one of {[d for d in range(1, number + 1) if all(each % d == 0 for each in heads.values())]}"
                )
    for layer in _leaves(found.layers):
        for name, dim in SplitDims.of_layer(layer.module, layer.style, user_name(layer.name)).of.items():
            parameter = layer.module._parameters.get(name)
            if parameter is not None:
                check_divides(f"{user_name(layer.name)}.{name}", parameter, dim, size)
                _check_alone(root, parameter, user_name(layer.name))
    split_vocabulary(root, found, given, size)
    return found.splits_heads


def split_model(root: nn.Module, given: Mapping[str, str] | None, axis: DeviceMesh, group: ProcessGroup) -> None:
    """Split a model's layers and parameters in place. Every rank must call it, before the model is sharded.

    Args:
        root: the LightningModule, which `check_split` has passed.
        given: the plan; None for the model's own.
        axis: of the mesh of parameters, over which they are split.
        group: the same ranks, for what layers send.
    """
    (found, packed), state = packed_layers(root, given, axis.size()), TensorParallel(group)
    dims: dict[tuple[nn.Module, str], int] = {}
    leaves, vocabulary = _leaves(found.layers), split_vocabulary(root, found, given, axis.size())
    for layer in leaves:
        of_layer = SplitDims.of_layer(layer.module, layer.style, user_name(layer.name))
        dims.update({(layer.module, name): dim for name, dim in of_layer.of.items()})
        split_forward(layer, of_layer, state)
    for inside, decided in packed.items():
        if decided.own:
            split_numbers(root.get_submodule(inside), dict(decided.own), state)
    for each in vocabulary.layers.values():
        split_words(each, axis, group)
    split_parameters(root, axis, dims | vocabulary.dims)
    logging.getLogger(_REDISTRIBUTION).addFilter(_is_no_advice)
    remember(root, state)
    rank_zero_info(
        f"sequence_parallel: {len(leaves)} layers are split over {axis.size()} ranks"
        + (f", and the words of {shown([user_name(name) for name in vocabulary.layers])}" if vocabulary.layers else "")
    )
    if vocabulary.whole:
        rank_zero_warn(f"tensor parallelism leaves words whole on every rank: {'; '.join(vocabulary.whole)}")
    if gathered := {each.whole for each in packed.values() if each.whole}:
        rank_zero_warn(
            f"tensor parallelism gathers the outputs of layers for several things: {shown(sorted(gathered), '; ')}"
        )
    if found.whole:
        rank_zero_warn(
            f"tensor parallelism: of the model's plan {len(found.whole)} entries are not carried, or stand beside such: {shown(found.whole)}. "
            "These layers are whole on every rank: exact, without a gain in memory or time"
        )


def _is_no_advice(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("While redistributing from")


def _leaves(layers: tuple[SplitLayer, ...]) -> list[SplitLayer]:
    """Return the layers whose weights are split, those of LoRA in the place of what it wraps.

    colwise: base colwise, B colwise, A whole        rowwise: base rowwise, A rowwise, B whole        the other styles of columns and rows alike
    """
    leaves: list[SplitLayer] = []
    for layer in layers:
        base: Any = getattr(layer.module, "base_layer", None)
        if not isinstance(base, nn.Module):
            leaves.append(layer)
            continue
        _check_lora(layer)
        of_adapters: Any = getattr(layer.module, "lora_B" if layer.style in _COLUMNS else "lora_A")
        inner = {f"{layer.name}.base_layer": base} | {
            f"{layer.name}.{name}": each for name, each in of_adapters.items()
        }
        leaves += [replace(layer, name=name, module=each) for name, each in inner.items()]
    return leaves


def _check_lora(layer: SplitLayer) -> None:
    """Refuse what wraps a layer and is not plain LoRA."""
    module, name = layer.module, user_name(layer.name)
    found: Any = module
    plain = (
        all(isinstance(getattr(module, each, None), nn.ModuleDict) for each in ("lora_A", "lora_B"))
        and not any(getattr(found, "use_dora", {}).values())
        and not len(getattr(found, "lora_embedding_A", ()))
        and layer.style in (*_COLUMNS, *_ROWS)
    )
    if not plain:
        raise SequenceParallelError(
            f"{name} is a {type(module).__module__}.{type(module).__qualname__} around a layer that the plan splits as {layer.style!r}: carried "
            "is plain LoRA of nn.Linear, by columns or rows, without DoRA; leave the layer out of tensor_parallel_plan"
        )
    rates = [float(getattr(each, "p", 0.0)) for each in getattr(found, "lora_dropout", {}).values()]
    if layer.style == "rowwise" and any(rates):
        raise SequenceParallelError(
            f"{name} has lora_dropout={max(rates)} on inputs of which each rank has a part: the ranks would drop the same elements of each; use "
            "lora_dropout=0, or leave the layer out of target_modules"
        )


def _check_alone(root: nn.Module, parameter: nn.Parameter, name: str) -> None:
    owners = [each for each in root.modules() for own in each._parameters.values() if own is parameter]
    if len(owners) > 1:
        raise SequenceParallelError(
            f"{name} shares its weight with {len(owners) - 1} other modules, and the plan splits it: they would have parts; leave it out of "
            "tensor_parallel_plan, or do not tie it"
        )
