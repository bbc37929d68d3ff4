"""Layers for several things in a plan: which of them are split part by part, and what becomes of those that cannot be.

packed_colwise, by name                                   split by parts, or refused
colwise_gather_output before rowwise_split_input          of a model's own plan: split by parts and rowwise, or left so, with the reason
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.tensor_parallel.packed_trial import PackedParts, packed_parts
from lightning_sp.parallelize.tensor_parallel.plan import PACKED, SplitLayer, SplitLayers, split_layers
from lightning_sp.parameter_names import user_name


def packed_layers(
    root: nn.Module, given: Mapping[str, str] | None, size: int
) -> tuple[SplitLayers, dict[str, PackedParts]]:
    """Return which layers are split, and how those for several things are, by the name of the module around each. Equal on all ranks.

    Of a model's own plan a layer whose outputs are gathered is split by its parts, if it is one for several things and the next one takes its
    share of what becomes of them.

    Args:
        root: the LightningModule, whole; weights may be without memory.
        given: the plan; None for the model's own.
        size: ranks.

    Raises:
        SequenceParallelError: a plan names one whose parts are not known.
    """
    found = split_layers(root, given)
    packed: dict[str, PackedParts] = {}
    tried: dict[Any, PackedParts] = {}
    for layer in found.layers:
        if layer.style == PACKED or (given is None and _is_gathered_alone(found, layer)):
            packed[layer.inside] = packed_parts(root, found.layers, layer, size, tried)
            if (why := packed[layer.inside].whole) and layer.style == PACKED:
                raise SequenceParallelError(
                    f"{user_name(layer.name)} is split as {PACKED!r}: {why}; use 'colwise_gather_output' for it and 'rowwise_split_input' for "
                    "the layer behind it, whose neighbours then have all heads and features, or leave both out of tensor_parallel_plan"
                )

    def as_decided(layer: SplitLayer) -> SplitLayer:
        of_module = packed.get(layer.inside)
        if of_module is None or of_module.whole:
            return layer
        if layer.style in (PACKED, "colwise_gather_output"):
            # One part alone is in the order of ranks.
            return replace(layer, style=PACKED if len(of_module.parts) > 1 else "colwise", parts=of_module.parts)
        return replace(layer, style="rowwise") if layer.style == "rowwise_split_input" else layer

    return replace(found, layers=tuple(as_decided(each) for each in found.layers)), packed


def _is_gathered_alone(found: SplitLayers, layer: SplitLayer) -> bool:
    """Return whether a layer is the only one of its module whose outputs are gathered, before one that takes its share of them."""
    styles = [each.style for each in found.layers if each.inside == layer.inside]
    pair = ("colwise_gather_output", "rowwise_split_input")
    return layer.style == pair[0] and all(styles.count(each) == 1 for each in pair)
