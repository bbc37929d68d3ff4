"""What a module in a model is called with, made up, and the module ready to run on it: in float64 on this host, without weights of its own.

A model's forward of a few tokens runs without data up to the call of the module; the shapes of what it is given there are filled at random.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

_ROWS, _TOKENS = 2, 5
SEED = 3


class Reached(Exception):  # noqa: N818 - no error
    """Leaves a forward where what it was run for is known."""

    def __init__(self, found: Any) -> None:
        super().__init__("reached")
        self.found = found


def modules_but(inside: nn.Module, outer: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in one, and itself, but for some and what is in them."""
    left = {each for module in outer for each in module.modules()}
    yield from ((name or "its own", each) for name, each in inside.named_modules() if each not in left)


@contextmanager
def with_attributes(module: nn.Module, **values: Any) -> Iterator[None]:
    """Let a module have other attributes, and take back whatever becomes of all of them."""
    before = dict(vars(module))
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).clear()
        vars(module).update(before)


@contextmanager
def on_made_up_weights(inside: nn.Module, outer: set[nn.Module]) -> Iterator[None]:
    """Let a module compute in float64 on this host, without dropout; its weights are made up."""
    generator = torch.Generator().manual_seed(SEED)

    def made(tensor: Tensor | None, is_weight: bool) -> Tensor | None:
        if tensor is None or not (tensor.is_floating_point() or tensor.is_meta):
            return tensor
        if is_weight or tensor.is_meta:
            return _random(tensor, generator)
        return tensor.detach().to("cpu", torch.float64)

    with ExitStack() as undo:
        for _, each in modules_but(inside, outer):
            undo.enter_context(
                with_attributes(
                    each,
                    training=False,
                    _parameters={name: made(value, True) for name, value in each._parameters.items()},
                    _buffers={name: made(value, False) for name, value in each._buffers.items()},
                )
            )
        yield


def made_up_arguments(root: nn.Module, inside: str, inputs: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a module in a model is called with: of the shapes of a few tokens' forward without data, and made up.

    Raises:
        Exception: what the model's forward raises on tokens alone.
    """
    module = root.get_submodule(inside)
    generator = torch.Generator().manual_seed(SEED)
    named = inspect.signature(module.forward).parameters.values()
    required = [each for each in named if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    parts = inside.split(".")
    holders = [root.get_submodule(".".join(parts[:end])) for end in range(len(parts) - 1, -1, -1)]
    takes_ids = [each for each in holders if "input_ids" in inspect.signature(each.forward).parameters]
    if len(named) == 1 or (not takes_ids and len(required) <= 1):
        return (torch.randn(_ROWS, _TOKENS, inputs, dtype=torch.float64, generator=generator),), {}
    if not takes_ids:
        raise TypeError(f"its forward takes {', '.join(each.name for each in required)}")
    args, kwargs = _call_without_data(takes_ids[0], module)
    made: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
        Tensor, lambda each: _random(each, generator), (args, kwargs)
    )
    return made


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    if like.is_floating_point():
        return torch.randn(like.shape, dtype=torch.float64, generator=generator)
    return (
        torch.ones(like.shape, dtype=like.dtype)
        if like.dtype == torch.bool
        else torch.zeros(like.shape, dtype=like.dtype)
    )


def _call_without_data(model: nn.Module, module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a module is called with in its model's forward of a few tokens, as fake tensors."""
    taken = inspect.signature(model.forward).parameters
    state, made = {}, dict[int, Tensor]()
    log = logging.getLogger(FakeTensorMode.__module__)

    def reached(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise Reached((args, kwargs))

    with ExitStack() as undo:
        undo.enter_context(_attributes_of_all(model))
        undo.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        undo.enter_context(torch.no_grad())
        undo.callback(setattr, log, "disabled", log.disabled)
        log.disabled = True  # the traceback of a forward that fails: the caller says why
        undo.callback(module.register_forward_pre_hook(reached, prepend=True, with_kwargs=True).remove)
        for prefix, each in model.named_modules():
            for name, tensor in [*each._parameters.items(), *each._buffers.items()]:
                if tensor is not None:
                    made.setdefault(id(tensor), torch.empty(tensor.shape, dtype=tensor.dtype))
                    state[f"{prefix}.{name}" if prefix else name] = made[id(tensor)]
        given: dict[str, Any] = {"input_ids": torch.zeros(_ROWS, _TOKENS, dtype=torch.long)}
        if "position_ids" in taken and taken["position_ids"].default is inspect.Parameter.empty:
            given["position_ids"] = torch.arange(_TOKENS).expand(_ROWS, -1)
        if "use_cache" in taken:
            given["use_cache"] = False
        try:
            functional_call(model, state, (), given, tie_weights=False)
        except Reached as found:
            call: tuple[tuple[Any, ...], dict[str, Any]] = found.found
            return call
    raise RuntimeError("it is not called for tokens alone")


@contextmanager
def _attributes_of_all(model: nn.Module) -> Iterator[None]:
    """Take back what a forward leaves in a model's modules."""
    with ExitStack() as undo:
        for each in model.modules():
            undo.enter_context(with_attributes(each))
        yield
