"""Whatever holds a parameter from before it was sharded holds the new one behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

import pytest
import torch
from torch import nn

from lightning_sp.parallelize.captured_parameters import CapturedParameters


class Keeps:
    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight

    def read(self) -> nn.Parameter:
        return self.weight


class Slotted:
    __slots__ = ("weight",)

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight


def _defaults(weight: nn.Parameter) -> Callable[[], tuple[nn.Parameter, nn.Parameter]]:
    def read(first: nn.Parameter = weight, *, second: nn.Parameter = weight) -> tuple[nn.Parameter, nn.Parameter]:
        return first, second

    return read


def _enclosing(weight: nn.Parameter) -> Callable[[], nn.Parameter]:
    def read() -> nn.Parameter:
        return weight

    return read


# How a holder is made of a weight, and how the weight is read from it.
HOLDERS: dict[str, tuple[Callable[[nn.Parameter], Any], Callable[[Any], Any]]] = {
    "list": (lambda w: [w], lambda held: held[0]),
    "tuple in a deque": (lambda w: deque([(w, 1)]), lambda held: held[0][0]),
    "value": (lambda w: {"w": w}, lambda held: held["w"]),
    "key": (lambda w: {w: "w", "other": 1}, lambda held: next(iter(held))),
    "set": (lambda w: {w}, lambda held: next(iter(held))),
    "frozenset": (lambda w: frozenset([w]), lambda held: next(iter(held))),
    "object": (Keeps, lambda held: held.weight),
    "method": (lambda w: Keeps(w).read, lambda held: held()),
    "function": (_enclosing, lambda held: held()),
    "function in a list": (lambda w: [_enclosing(w)], lambda held: held[0]()),
    "default": (_defaults, lambda held: held()[0]),
    "default of a keyword": (_defaults, lambda held: held()[1]),
    "slot": (Slotted, lambda held: held.weight),
    "partial": (lambda w: partial(torch.mul, w, other=2), lambda held: held.args[0]),
    "reference": (ref, lambda held: held()),
    "weak key": (lambda w: WeakKeyDictionary({w: 1}), lambda held: next(iter(held.keys()))),
    "optimizer": (lambda w: torch.optim.AdamW([w]), lambda held: held.param_groups[0]["params"][0]),
    "schedule": (
        lambda w: torch.optim.lr_scheduler.StepLR(torch.optim.SGD([w], lr=0.1), 1),
        lambda held: held.optimizer.param_groups[0]["params"][0],
    ),
}


def _sharded(module: nn.Linear) -> nn.Parameter:
    """Put another parameter in the place of a weight, as FSDP2 does; return it."""
    module._parameters["weight"] = nn.Parameter(module.weight.detach().clone())
    return module.weight


@pytest.mark.parametrize("where", ["module", "callback"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_holder_has_the_new_parameter(holder, where):
    module: Any = nn.Linear(2, 2)
    make, read = HOLDERS[holder]
    held = make(module.weight)
    callback = SimpleNamespace(held=held)
    if where == "module":
        module.held = held
    else:
        object.__setattr__(module, "_trainer", SimpleNamespace(callbacks=[callback]))
    captured = CapturedParameters(module)
    new = _sharded(module)
    captured.renew()
    assert read(module.held if where == "module" else callback.held) is new


class OfClass(nn.Linear):
    kept: ClassVar[list[nn.Parameter]] = []


OF_FILE: list[nn.Parameter] = []


def test_names_of_the_users_classes_and_files_are_renewed():
    """A penalty that reads them in a function of the file had the weights of before."""
    module = OfClass(2, 2)
    OfClass.kept[:], OF_FILE[:] = [module.weight], [module.weight]
    module.read = lambda: OF_FILE  # type: ignore[assignment]  # it leads to the file
    captured = CapturedParameters(module)
    new = _sharded(module)
    captured.renew()
    try:
        assert OfClass.kept[0] is new
        assert OF_FILE[0] is new
    finally:
        OfClass.kept.clear(), OF_FILE.clear()


def test_numbers_of_parameters_are_those_of_the_new_ones():
    module: Any = nn.Linear(2, 2)
    module.numbers, module.names, module.number = {id(module.weight), 3}, {id(module.weight): "w"}, id(module.weight)
    captured = CapturedParameters(module)
    new = _sharded(module)
    captured.renew()
    assert (module.numbers, module.names, module.number) == ({id(new), 3}, {id(new): "w"}, id(new))


def test_what_a_hook_encloses_is_renewed():
    module = nn.Linear(2, 2, bias=False)
    weight = module.weight
    module.register_forward_hook(lambda _, args, output: output * weight.sum())
    captured = CapturedParameters(module)
    new = _sharded(module)
    captured.renew()
    with torch.no_grad():
        new.fill_(1.0)
    assert module(torch.ones(1, 2)).tolist() == [[8.0, 8.0]]


def test_a_dict_keeps_its_order_and_an_optimizer_that_has_stepped_its_parameters():
    """It has states of whole parameters, which shards do not fit: it is refused as it is."""
    module: Any = nn.Linear(2, 2)
    before = module.weight
    module.order = {"first": 1, before: 2, "last": 3}
    module.optimizer = torch.optim.SGD([before], lr=0.1, momentum=0.9)
    before.grad = torch.ones(2, 2)
    module.optimizer.step()
    captured = CapturedParameters(module)
    new = _sharded(module)
    captured.renew()
    assert list(module.order) == ["first", new, "last"]
    assert module.optimizer.param_groups[0]["params"][0] is before
