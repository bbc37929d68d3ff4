"""Which layers of a model are split over ranks, and how: by a plan of names that is given, or that the model itself has.

    {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}        * is one part of a name

A name is the end of a module's: a plan of a model is one of whatever holds the model. A plan of Hugging Face's may hold styles that are not
carried; what stands beside such a layer in one module stays whole with it, for a split layer's neighbours have parts of its numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_sp.config import TENSOR_PARALLEL_STYLES
from lightning_sp.errors import SequenceParallelError
from lightning_sp.parameter_names import shown, user_name

# Of a table of the vocabulary, and of an output head.
_TABLE, _HEAD = "embedding_rowwise", "colwise_gather_output"
# Of a layer for several things, whose outputs are split part by part.
PACKED = "packed_colwise"
# By which a plan of Hugging Face's leaves a table whole here.
_WHOLE_TABLE = ("embedding_colwise", "replicate")
_ATTENTION = re.compile(r"att(n|ention)", re.IGNORECASE)


@dataclass(frozen=True)
class SplitLayer:
    """A layer of a plan.

    Args:
        name: of the module.
        module: itself.
        style: one of `TENSOR_PARALLEL_STYLES`.
        inside: name of the module in whose forward its outputs, or inputs, are this rank's part.
        parts: of a packed layer how many outputs each thing has, in order.
    """

    name: str
    module: nn.Module
    style: str
    inside: str
    parts: tuple[int, ...] = ()

    @property
    def is_of_attention(self) -> bool:
        """Whether it is part of an attention, whose heads it splits then."""
        return bool(_ATTENTION.search(self.name))


@dataclass(frozen=True)
class SplitLayers:
    """What a plan splits of a model.

    Args:
        layers: in the order of the model's modules.
        whole: patterns of the plan that are not carried or stand beside such, with their styles: these layers stay whole.
        vocabulary: tables and output heads that it splits by their words.
        whole_tables: those that it leaves whole.
    """

    layers: tuple[SplitLayer, ...]
    whole: tuple[str, ...]
    vocabulary: tuple[nn.Module, ...] = ()
    whole_tables: frozenset[nn.Module] = frozenset()

    @property
    def splits_heads(self) -> bool:
        """Whether each rank has heads of its own."""
        return any(each.is_of_attention and each.style in ("colwise", PACKED) for each in self.layers)


def split_layers(root: nn.Module, given: Mapping[str, str] | None) -> SplitLayers:
    """Return which layers a plan splits. Equal on all ranks.

    Args:
        root: the LightningModule.
        given: the plan; None for what the models inside say.

    Raises:
        SequenceParallelError: there is no plan, or it names no layer of the model.
    """
    plan = dict(given) if given is not None else _own_plan(root)
    if not plan:
        raise SequenceParallelError(
            "tensor_parallel_size above 1, and no model here says which of its layers to split: none has a tp_plan, as Hugging Face's models "
            "do; give one, tensor_parallel_plan={'layers.*.mlp.up_proj': 'colwise', 'layers.*.mlp.down_proj': 'rowwise', ...}, or use "
            "sequence_parallel_size alone"
        )
    names = [name for name, _ in root.named_modules(remove_duplicate=False)]
    modules = dict(root.named_modules(remove_duplicate=False))
    found = {pattern: [name for name in names if _matches(pattern, user_name(name))] for pattern in plan}
    if given is not None and (unknown := [pattern for pattern, each in found.items() if not each]):
        raise SequenceParallelError(
            f"tensor_parallel_plan: {len(unknown)} names are of no module of the model: {shown(unknown)}; of its modules "
            f"{shown([user_name(name) for name in names if name][:50])}"
        )
    heads = [pattern for pattern in plan if _is_head(root, [modules[name] for name in found[pattern]])]
    if given is not None and (others := [pattern for pattern in heads if plan[pattern] not in (_HEAD, _TABLE)]):
        raise SequenceParallelError(
            f"tensor_parallel_plan[{others[0]!r}]={plan[others[0]]!r}: an output head is split by its words, and a step sees the logits of all; "
            f"use {_HEAD!r}"
        )
    split = [pattern for pattern, style in plan.items() if style == _TABLE or (pattern in heads and style == _HEAD)]
    left = [pattern for pattern, style in plan.items() if style in _WHOLE_TABLE]
    left = [pattern for pattern in left if all(isinstance(modules[name], nn.Embedding) for name in found[pattern])]
    tables = {*split, *heads, *left}
    refused = {pattern for pattern, style in plan.items() if not _is_carried(style, found[pattern])} - tables
    apart = {_parent(pattern) for pattern in refused}
    whole = [each for each in plan if each not in tables and (each in refused or _parent(each) in apart)]
    layers = {
        name: SplitLayer(name, modules[name], plan[pattern], _parent(name))
        for pattern, each in found.items()
        if pattern not in tables and pattern not in whole
        for name in each
    }
    ordered = tuple(layers[name] for name in names if name in layers)
    vocabulary = tuple(dict.fromkeys(modules[name] for pattern in split for name in found[pattern]))
    is_named = given is not None and vocabulary
    if not is_named and not any(each.style != "replicated_with_grad_allreduce" for each in ordered):
        raise SequenceParallelError(
            f"tensor_parallel_size above 1, and the plan splits no layer of this model: of {len(plan)} names {len(whole)} are of styles that "
            f"are not carried ({shown([f'{name}: {plan[name]}' for name in whole])}), or stand beside such; give a tensor_parallel_plan of "
            f"{', '.join(TENSOR_PARALLEL_STYLES)}, or use sequence_parallel_size alone"
        )
    # A model inside of one that has a plan says the same, by shorter names.
    said = [each for each in whole if not any(other.endswith(f".{each}") for other in whole)]
    whole_tables = frozenset(modules[name] for pattern in tables - {*split} for name in found[pattern])
    return SplitLayers(ordered, tuple(f"{each} ({plan[each]})" for each in said), vocabulary, whole_tables)


def _own_plan(root: nn.Module) -> dict[str, str]:
    """Return what the models inside say, the outermost first."""
    plan: dict[str, str] = {}
    for each in root.modules():
        own: Any = getattr(type(each), "tp_plan", None)
        if own is not None and isinstance(own := getattr(each, "tp_plan", None), Mapping):
            plan = {**own, **plan}
    return plan


def _matches(pattern: str, name: str) -> bool:
    return re.search(rf"(^|\.){re.escape(pattern).replace(re.escape('*'), '[^.]+')}$", name) is not None


def _is_carried(style: str, names: list[str]) -> bool:
    """Return whether layers of a style are split; packed weights of experts, in a model's own plan, are no layers."""
    return style in TENSOR_PARALLEL_STYLES and (style != PACKED or bool(names))


def _parent(pattern: str) -> str:
    return pattern.rpartition(".")[0]


def _is_head(root: nn.Module, modules: list[nn.Module]) -> bool:
    """Return whether layers are output heads, which a loss may read without a call."""
    heads = {head for head in _heads(root) if head is not None}
    return any(each in heads for each in modules)


def _heads(root: nn.Module) -> Iterator[nn.Module | None]:
    for each in root.modules():
        get = getattr(each, "get_output_embeddings", None)
        if callable(get):
            yield get()
