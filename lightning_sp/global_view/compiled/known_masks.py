"""Masks that a captured graph makes of lengths and buffers alone: made before it runs, and looked at, so that a band needs no matrix.

    seen = torch.ones(t, t).tril() == 0             a node of lengths alone
    scores.masked_fill(seen, -inf)                  is given it as an input, with its numbers while the variant is traced

A variant holds for all masks that are the same band, whatever the length; of other masks for these numbers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from lightning_sp.global_view.compiled.written_nodes import written_nodes
from lightning_sp.global_view.masks.bands import band_of


class KnownMasks:
    """The masks of a graph. A class because they are made once for each length.

    Args:
        graph: as Dynamo captured it.
    """

    def __init__(self, graph: GraphModule) -> None:
        self._graph = graph
        self._placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self._found: dict[tuple[bool, ...], tuple[dict[Node, None], list[str]]] = {}
        self._made: dict[Any, tuple[list[Tensor], Any, list[Any]]] = {}

    def of(self, args: Sequence[Any], buffers: Callable[[], set[int]]) -> tuple[list[str], list[Tensor], Any]:
        """Return the names of the masks' nodes, the masks, and what tells the variant that holds for them from others.

        Args:
            args: of the graph.
            buffers: the ids of those of the module that runs.
        """
        known = buffers()
        kinds = tuple(id(each) in known for each in args)
        if kinds not in self._found:
            constant = _constant_nodes(
                self._graph, {node for node, is_known in zip(self._placeholders, kinds, strict=True) if is_known}
            )
            names = [
                each.name for each in constant if _is_mask(each) and any(user not in constant for user in each.users)
            ]
            self._found[kinds] = constant, names
        constant, names = self._found[kinds]
        if not names:
            return [], [], ()
        inputs = {node: value for node, value in zip(self._placeholders, args, strict=True) if node in constant}
        # The tensors are kept with what was made of them: no other has their memory meanwhile.
        key = (kinds, *((id(each), each._version) if isinstance(each, Tensor) else each for each in inputs.values()))
        if key not in self._made:
            self._made = {
                each: made for each, made in self._made.items() if _lengths(each) == _lengths(key)
            }  # a mask may be large
            masks = _Constants(self._graph, constant, names).made(inputs)
            self._made[key] = masks, (kinds, *(_kind(each, key) for each in masks)), list(inputs.values())
        masks, kind, _ = self._made[key]
        return names, masks, kind


def _lengths(key: Any) -> list[int]:
    return [each for each in key if isinstance(each, int)]


class _Constants(Interpreter):
    """Runs the nodes that depend on lengths and buffers alone."""

    def __init__(self, graph: GraphModule, constant: dict[Node, None], names: Sequence[str]) -> None:
        super().__init__(graph)
        self._constant, self._names = constant, names

    @torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
    def made(self, inputs: dict[Node, Any]) -> list[Tensor]:
        """Return what the named nodes give."""
        self.env = dict(inputs)
        found: dict[str, Tensor] = {}
        for node in self._constant:
            if node not in self.env:
                self.env[node] = self.run_node(node)
            if node.name in self._names:
                found[node.name] = self.env[node]
        return [found[name] for name in self._names]


def _kind(mask: Tensor, numbers: Any) -> Any:
    """Return what a variant holds for: a band, with the number that hides, or these numbers."""
    band, is_hidden = band_of(mask), False
    if band is None and mask.dtype == torch.bool:
        band, is_hidden = band_of(~mask), True  # it says which keys are hidden
    if band is None or band.keys is not None:
        return mask.dtype, numbers
    return (
        mask.dtype,
        mask.dim(),
        is_hidden,
        band.before,
        band.after,
        float(mask.min()) if mask.is_floating_point() else None,
    )


def _constant_nodes(graph: GraphModule, buffers: set[Node]) -> dict[Node, None]:
    """Return the nodes that depend on lengths and buffers alone, in order; none where the graph writes into such a tensor."""
    found: dict[Node, None] = {}
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        if node.op == "placeholder":
            is_buffer = node in buffers and isinstance(value, Tensor) and not value.requires_grad
            if isinstance(value, (int, torch.SymInt)) or is_buffer:
                found[node] = None
            continue
        if node.op not in ("call_function", "call_method"):
            continue
        reads = node.all_input_nodes
        if written_nodes(node) and any(each in found for each in reads):
            return {}  # what was made before is another since
        if not all(each in found for each in reads) or not isinstance(value, Tensor | int | torch.SymInt):
            continue
        if isinstance(value, Tensor) and (value.requires_grad or "rand" in str(node.target)):
            continue
        found[node] = None
    return found


def _is_mask(node: Node) -> bool:
    """Return whether a node gives numbers of pairs of tokens."""
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor) or value.dim() < 2 or value.is_complex():
        return False
    return bool(value.shape[-1] == value.shape[-2]) and bool(value.shape[-1] != 1)
