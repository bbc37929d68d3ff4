"""Which parts a layer for several things has, by a trial: nothing is taken from names alone, and nothing is guessed.

The module around it runs on made-up numbers, once as one device does and once for each rank with that rank's share of each part:

    z, made up -> module's own cuts, views, attention, activation -> u              u: what the layer behind takes
    z of a rank ->                  the same                     -> u of a rank     equal to its part of u, for every rank, or it is no split

Parts that may be: two halves (gate, up); one as wide as u and two that share the rest (q, k, v: grouped heads, too); one, whose rows are in the
order of heads already. What a module reads of its own numbers of heads and features is divided, if the trial needs it: heads first, then widths.
The layers themselves do not run, so weights may be anywhere, and of any kind.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_sp.parallelize.tensor_parallel.made_up_calls import (
    SEED,
    Reached,
    made_up_arguments,
    modules_but,
    on_made_up_weights,
    with_attributes,
)
from lightning_sp.parallelize.tensor_parallel.packed import own_attributes
from lightning_sp.parallelize.tensor_parallel.plan import SplitLayer
from lightning_sp.parameter_names import shown, user_name

# Attributes that count heads, and those that are widths.
_HEADS = re.compile(r"head", re.IGNORECASE)
_NO_COUNT = re.compile(r"dim|size|group|idx|index|per_", re.IGNORECASE)
_WIDTHS = re.compile(r"size|dim|embd|hidden|width|features|d_model", re.IGNORECASE)
_NUMBER = re.compile(r"idx|index", re.IGNORECASE)
_OF_A_HEAD = re.compile(r"(head_(dim|size))|(.*_per_.*)", re.IGNORECASE)
# Whether there is a mask, and which, is for the model to say: kernels of other devices do not run here.
_IMPLEMENTATION = "_attn_implementation_internal"
# Of the largest number: modules compute softmax and rotations in float32. What is split wrongly differs by about all of it.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class PackedParts:
    """How a layer for several things is split.

    Args:
        parts: how many outputs each thing has, in order.
        own: attributes that the module around it has on a rank: numbers of heads and widths by name, those of its config by "config.name".
        whole: why it cannot be split; empty if it can.
    """

    parts: tuple[int, ...] = ()
    own: tuple[tuple[str, int], ...] = ()
    whole: str = ""


def packed_parts(
    root: nn.Module, layers: Iterable[SplitLayer], layer: SplitLayer, size: int, tried: dict[Any, PackedParts]
) -> PackedParts:
    """Return how a layer for several things is split, or why it is not. Equal on all ranks; nothing of the model is changed.

    Args:
        root: the LightningModule, whole; weights may be without memory.
        layers: of the plan.
        layer: one of them.
        size: ranks.
        tried: what is known of modules: one of each kind is tried, and added to it.
    """
    inside, behind = root.get_submodule(layer.inside), _behind(layers, layer)
    if behind is None:
        return PackedParts(
            whole=f"no single layer of the plan in {user_name(layer.inside)} takes what becomes of its outputs"
        )
    outer = {layer.module, behind.module}
    named = {each.module for each in layers}
    if others := [name for name, each in modules_but(inside, outer) if each not in named and each._parameters]:
        return PackedParts(
            whole=f"{user_name(layer.inside)} has weights besides, of which a rank's share is not known: {shown(others)}"
        )
    if (widths := _widths(layer.module)) is None or (taken := _widths(behind.module)) is None:
        return PackedParts(
            whole=f"{user_name(layer.name)} or the layer behind it is no plain nn.Linear, Conv1D or LoRA of one"
        )
    if (kind := _kind(inside, outer, widths, taken)) not in tried:
        tried[kind] = _of_kind(root, layer, behind, size)
    return tried[kind]


def _kind(inside: nn.Module, outer: set[nn.Module], *widths: tuple[int, int]) -> tuple[Any, ...]:
    """Return what is alike of modules that are split alike: classes and attributes, but for weights and their number in the model."""
    inner = [(name, type(each), *_attributes_by_value(each)) for name, each in modules_but(inside, outer)]
    return (*inner, *widths)


def _attributes_by_value(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if not name.startswith("_") and not _NUMBER.search(name):
            is_plain = isinstance(value, (int, float, str, type(None)))
            yield name, repr(value) if is_plain else id(value)


def _of_kind(root: nn.Module, layer: SplitLayer, behind: SplitLayer, size: int) -> PackedParts:
    inside, outer = root.get_submodule(layer.inside), {layer.module, behind.module}
    widths, taken = _widths(layer.module), _widths(behind.module)
    assert widths is not None
    assert taken is not None
    inputs, outputs = widths
    try:
        args, kwargs = made_up_arguments(root, layer.inside, inputs)
    except Exception as error:  # whatever a model raises on made-up tokens
        return PackedParts(whole=f"what {user_name(layer.inside)} is called with is not known: {_line(error)}")
    with on_made_up_weights(inside, outer):
        trial = _Trial(inside, layer.module, behind.module, args, kwargs)
        return _tried(trial, user_name(layer.inside), (outputs, taken[0]), size)


def _behind(layers: Iterable[SplitLayer], layer: SplitLayer) -> SplitLayer | None:
    found = [
        each for each in layers if each.inside == layer.inside and each.style in ("rowwise", "rowwise_split_input")
    ]
    return found[0] if len(found) == 1 else None


def _widths(layer: nn.Module) -> tuple[int, int] | None:
    """Return the numbers of inputs and outputs of a linear layer, which may have LoRA around it; None of what is none, or computes otherwise."""
    base: Any = getattr(layer, "base_layer", layer)
    is_linear = isinstance(base, nn.Linear) or type(base).__name__ == "Conv1D"
    if not is_linear or "forward" in vars(base) or is_parametrized(base):
        return None
    outputs, inputs = base.weight.shape if isinstance(base, nn.Linear) else base.weight.shape[::-1]
    return int(inputs), int(outputs)


def _tried(trial: _Trial, name: str, widths: tuple[int, int], size: int) -> PackedParts:
    """Try all parts that may be, with as few divided numbers as will do."""
    outputs, taken = widths
    shared = (outputs - taken) // 2
    may_be = [
        *([(taken, taken)] if outputs == 2 * taken else []),
        *([(taken, shared, shared)] if outputs > taken and (outputs - taken) % 2 == 0 else []),
        (outputs,),
    ]
    divided = [parts for parts in may_be if all(each % size == 0 for each in parts)]
    if not divided or taken % size:
        return PackedParts(whole=f"tensor_parallel_size={size} does not divide its parts {may_be[0]}")
    try:
        [whole] = trial.run(outputs, [torch.arange(outputs)], {})
        if trial.draws(outputs, whole):
            return PackedParts(whole=f"{name} has dropout, and ranks that split weights draw alike: set it to 0")
    except Exception as error:  # whatever a forward raises on made-up numbers
        return PackedParts(whole=f"the forward of {name} failed on made-up numbers: {_line(error)}")
    said: list[str] = []
    for own in _own_numbers(trial.inside, {taken, shared}, size):
        for parts in divided:
            try:
                of_ranks = trial.run(outputs, [share(parts, rank, size) for rank in range(size)], own)
            except Exception as error:
                said.append(f"fails: {_line(error)}")
                continue
            if _same(of_ranks, whole):
                return PackedParts(parts, tuple(own.items()))
            said.append("gives other numbers")
    return PackedParts(
        whole=f"on a rank's share of each of {divided[0]} outputs, tried on made-up numbers, the forward of {name} {said[-len(divided)]}"
    )


def share(parts: tuple[int, ...], rank: int, size: int) -> Tensor:
    """Return which outputs a rank has: its share of each part. Shapes: (sum(parts) / size,)."""
    every = torch.split(torch.arange(sum(parts)), list(parts))
    return torch.cat([part.chunk(size)[rank] for part in every])


def _same(of_ranks: list[Tensor], whole: Tensor) -> bool:
    if {each.shape for each in of_ranks} != {whole.chunk(len(of_ranks), -1)[0].shape}:
        return False
    return bool((torch.cat(of_ranks, -1) - whole).abs().max() <= _ROUNDING * whole.abs().max())


def _own_numbers(inside: nn.Module, widths: set[int], size: int) -> Iterator[dict[str, int]]:
    """Yield what a rank's attributes may be: the model's; with its own numbers of heads; of features, too."""
    yield {}
    config = vars(inside).get("config")
    values = {**vars(inside), **{f"config.{name}": value for name, value in getattr(config, "__dict__", {}).items()}}
    heads = _divided(values, size, lambda name, _: bool(_HEADS.search(name)) and not _NO_COUNT.search(name))
    yield heads
    yield heads | _divided(
        vars(inside),
        size,
        lambda name, value: value in widths and bool(_WIDTHS.search(name)) and not _OF_A_HEAD.fullmatch(name),
    )


def _divided(values: Mapping[str, Any], size: int, counts: Callable[[str, int], bool]) -> dict[str, int]:
    return {
        name: value // size
        for name, value in values.items()
        if type(value) is int and value > 0 and value % size == 0 and counts(name, value)
    }


class _Trial:
    """Runs a module between two of its layers on made-up outputs of the first; a class because it is run many times.

    Args:
        inside: the module.
        first: the layer whose outputs are made up.
        last: the one whose input is looked at.
        args: of the module's forward.
        kwargs: of it.
    """

    def __init__(
        self, inside: nn.Module, first: nn.Module, last: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.inside, self.first, self.last, self.args, self.kwargs = inside, first, last, args, kwargs

    def run(self, outputs: int, shares: list[Tensor], own: Mapping[str, int]) -> list[Tensor]:
        """Return what the last layer takes, for each share of the outputs.

        Args:
            outputs: of the first layer.
            shares: which of them there are.
            own: attributes of the module meanwhile.
        """
        return [self._run_share(outputs, each, own) for each in shares]

    def draws(self, outputs: int, whole: Tensor) -> bool:
        """Return whether it gives other numbers in training."""
        with ExitStack() as undo:
            undo.enter_context(torch.random.fork_rng(devices=[]))
            for each in self.inside.modules():
                undo.enter_context(with_attributes(each, training=True))
            [trained] = self.run(outputs, [torch.arange(outputs)], {})
        return not _same([trained], whole)

    @torch.no_grad()
    def _run_share(self, outputs: int, share: Tensor, own: Mapping[str, int]) -> Tensor:
        def first(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            generator = torch.Generator().manual_seed(SEED)
            return torch.randn(*x.shape[:-1], outputs, dtype=torch.float64, generator=generator)[..., share]

        def last(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            raise Reached(x)

        values = own_attributes(self.inside, own)
        config = values.get("config", vars(self.inside).get("config"))
        if hasattr(config, _IMPLEMENTATION):
            values["config"] = copy.copy(config)
            vars(values["config"])[_IMPLEMENTATION] = "sdpa"
        with ExitStack() as undo:
            undo.enter_context(with_attributes(self.first, forward=first))
            undo.enter_context(with_attributes(self.last, forward=last))
            undo.enter_context(with_attributes(self.inside, **values))
            try:
                self.inside.forward(*self.args, **self.kwargs)
            except Reached as reached:
                found: Tensor = reached.found
                return found
        raise RuntimeError("the layer behind is not called")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
