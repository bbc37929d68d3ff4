"""Calls behind which nothing of what goes in is seen: a term of the loss times 0, a branch that a flag does not choose, a clamp with no slope.

    loss = ce + w * aux                   w = 0 while it is tried: d loss / d aux = 0, whatever aux is
    torch.where(flag, ce, ce + aux)       flag is True
    (kl - 1.0).clamp(min=0)               kl < 1 for every token
    torch.exp(logp - logp.detach())       1 for every token: the loss is the same number whatever tokens a rank has

Each is a call, known by its line and its number there, so that a whole run and one on shards can show the same. Shown, the number is 1, both
branches count, a clamp lets through what it is given, and of two that are equal one is a little larger, by its number.
"""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_sp.global_view.calls.call import is_sequence
from lightning_sp.global_view.table import name_of
from lightning_sp.preflight.recording.users_lines import multiplies_by_zero

# Of weights in a vector, of the losses that they weigh.
_MOST_WEIGHTS = 8
# A number that makes a term so small that another one hides it, where numbers are rounded.
_SMALL = 0.1
_TIMES = {"mul", "rmul", "imul", "multiply", "dot", "matmul", "rmatmul", "inner"}
_VECTORS_ALONE = {"dot", "matmul", "rmatmul", "inner"}
_CLAMPS = {"clamp", "clamp_min", "clamp_max", "clip", "relu", "relu6"}
_LARGER = {"maximum": 1, "fmax": 1, "max": 1, "minimum": -1, "fmin": -1, "min": -1}
_DIFFERENCES = {"sub", "subtract", "isub"}
_QUOTIENTS = {"div", "divide", "true_divide", "truediv", "idiv", "itruediv"}
# How far two numbers that are equal are brought apart: a ratio of 1 stays within the bounds that policies are clipped at.
_APART = 0.1
# In units of the numbers' own precision: what two forwards may make of the same.
_ROUNDINGS = 16
_SCALED = {"add": "alpha", "sub": "alpha", "iadd": "alpha", "isub": "alpha", "addcmul": "value", "addcdiv": "value"}


class Call(NamedTuple):
    """A call of the user's: its line, its function, and its number among those."""

    file: str
    line: int
    function: str
    number: int

    def describe(self) -> str:
        """Return it in words."""
        return f"{self.file.rpartition('/')[2]}:{self.line} ({linecache.getline(self.file, self.line).strip()})"


# What a call multiplies by; of other calls nothing.
Weights = tuple[float, ...]


def common_terms(of_runs: Sequence[Mapping[Call, Weights]], *, exact: bool) -> dict[Call, Weights]:
    """Return the calls that hide terms in every run, by the same numbers. Pure.

    Args:
        of_runs: what each has found.
        exact: whether a term that is small, but not hidden, would be seen.
    """
    first, *others = of_runs
    return {
        call: weights
        for call, weights in first.items()
        if all(each.get(call) == weights for each in others) and (not exact or _hides(call, weights))
    }


def _hides(call: Call, weights: Weights) -> bool:
    return call.function not in _TIMES or 0.0 in weights


class HiddenTerms(TorchFunctionMode):
    """Notes the calls that hide what they are given, and shows it in those that are to be shown.

    Args:
        shown: the calls.
        follows: whether numbers alone are looked at: of a run on shards, where a tensor may be a part.

    Attributes:
        found: the calls that hide something, with what they multiply by.
    """

    def __init__(self, shown: Mapping[Call, Weights], *, follows: bool = False) -> None:
        super().__init__()
        self.found: dict[Call, Weights] = {}
        self._shown, self._follows = shown, follows
        self._numbers: Counter[tuple[str, int, str]] = Counter()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(function)
        is_followed = name in _RULES and torch.is_grad_enabled() and any(map(_has_gradient, args))
        place = users_place(sys._getframe(1)) if is_followed else None
        if place is None:
            return function(*args, **kwargs)
        key = (*place, name)
        call = Call(*key, self._numbers[key])
        self._numbers[key] += 1
        if call in self._shown:
            return _RULES[name].show(name, function, args, kwargs)
        weights = _RULES[name].hides(name, args, kwargs, self._follows)  # before a call may write to what it is given
        if weights is not None and not (set(weights) == {0.0} and multiplies_by_zero(*place)):
            self.found[call] = weights
        return function(*args, **kwargs)


class _Rule(NamedTuple):
    """How a call hides, and how it shows what it has hidden.

    Args:
        hides: returns what the call multiplies by, None where it hides nothing: of its name, arguments, keywords, and whether it `follows`.
        show: calls the function so that it hides nothing: of its name, the function, arguments and keywords.
    """

    hides: Callable[[str, tuple[Any, ...], dict[str, Any], bool], Weights | None]
    show: Callable[[str, Any, tuple[Any, ...], dict[str, Any]], Any]


# ---- terms times a number


def _multiplied(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], _: bool) -> Weights | None:
    found = _term_and_weight(args)
    if found is None:
        return None
    term, weight = args[found[0]], args[found[1]]
    of_vectors = name in _VECTORS_ALONE or (isinstance(weight, Tensor) and weight.numel() > 1)
    if of_vectors and not (isinstance(weight, Tensor) and term.dim() == weight.dim() == 1):
        return None
    numbers = tuple(weight.double().flatten().tolist()) if isinstance(weight, Tensor) else (float(weight),)
    small = _SMALL if term.dim() == 0 or of_vectors else 0.0
    return numbers if any(number == 0 or abs(number) < small for number in numbers) else None


def _times_one(_: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = _term_and_weight(args)
    assert found is not None
    place = found[1]
    weight = args[place]
    one = torch.where(weight.abs() < _SMALL, 1, weight).to(weight.dtype) if isinstance(weight, Tensor) else 1.0
    return function(*args[:place], one, *args[place + 1 :], **kwargs)


def _term_and_weight(args: tuple[Any, ...]) -> tuple[int, int] | None:
    """Return which argument is a term that has a gradient, and which is a number, or few."""
    if len(args) != 2:
        return None
    for term, weight in ((0, 1), (1, 0)):
        if _has_gradient(args[term]) and _is_number(args[weight]):
            return term, weight
    return None


def _scaled(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], _: bool) -> Weights | None:
    scale = kwargs.get(_SCALED[name])
    is_zero = isinstance(scale, (int, float)) and scale == 0
    return (0.0,) if is_zero and any(map(_has_gradient, args[1:])) else None


def _scaled_by_one(name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **{**kwargs, _SCALED[name]: 1})


def _between(_: str, args: tuple[Any, ...], kwargs: dict[str, Any], __: bool) -> Weights | None:
    """Of `lerp(a, b, w)`."""
    weight = args[2] if len(args) > 2 else kwargs.get("weight")
    if not _is_number(weight) or (isinstance(weight, Tensor) and weight.numel() != 1):
        return None
    number = float(weight)  # type: ignore[arg-type]
    return (number,) if (number == 0 and _has_gradient(args[1])) or (number == 1 and _has_gradient(args[0])) else None


def _halfway(_: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight = args[2] if len(args) > 2 else kwargs["weight"]
    half = torch.full_like(weight, 0.5) if isinstance(weight, Tensor) else 0.5
    return function(*args[:2], half)


# ---- branches that a flag chooses


def _not_chosen(_: str, args: tuple[Any, ...], kwargs: dict[str, Any], __: bool) -> Weights | None:
    """Of `where(flag, a, b)`."""
    return None if _branch(args) is None else (float(args[0]),)


def _branch(args: tuple[Any, ...]) -> Any:
    """Return the branch that `where` does not choose; None where it is of no gradient, or the condition is no flag."""
    if len(args) != 3 or not (isinstance(args[0], Tensor) and args[0].numel() == 1 and not is_sequence(args[0])):
        return None
    branch = args[2] if bool(args[0]) else args[1]
    return branch if _has_gradient(branch) else None


def _both(_: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs) + 0.5 * _branch(args)


# ---- what has no slope


def _saturated(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], follows: bool) -> Weights | None:
    """Of clamps whose input is beyond their bounds everywhere."""
    given: Any = args[0]
    if not _has_gradient(given):
        return None
    return () if follows or (given.numel() > 0 and not bool(_has_slope(name, given, args[1:], kwargs).any())) else None


def _has_slope(name: str, given: Any, bounds: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return where a clamp of a tensor changes with it."""
    if name in ("relu", "relu6"):
        return (given > 0) & (given < 6 if name == "relu6" else True)
    first = (*bounds, None, None)[0]
    if name in ("clamp_min", "clamp_max"):
        return given >= kwargs.get("min", first) if name == "clamp_min" else given <= kwargs.get("max", first)
    low, high = kwargs.get("min", first), kwargs.get("max", (*bounds, None, None)[1])
    return (True if low is None else given >= low) & (
        torch.ones_like(given, dtype=torch.bool) if high is None else given <= high
    )


def _let_through(_: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] * 1


def _outdone(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], follows: bool) -> Weights | None:
    """Of `maximum(a, b)` where one of both is nowhere the larger."""
    if len(args) != 2 or kwargs or not all(isinstance(each, Tensor) for each in args):
        return None
    if not any(map(_has_gradient, args)):
        return None
    if follows:
        return ()
    a, b = args if _LARGER[name] > 0 else (-args[0], -args[1])
    hidden = (_has_gradient(a) and not bool((a >= b).any())) or (_has_gradient(b) and not bool((b >= a).any()))
    return () if hidden else None


def _sum_of_both(_: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] + args[1]


# ---- what is equal to what it is compared with: a policy's probabilities to its own before the first step


def _cancelled(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], follows: bool) -> Weights | None:
    """Of `a - b` and `a / b`, of which one has a gradient, and the other is the same without."""
    if (scaled := _scaled(name, args, kwargs, follows) if name in _SCALED else None) is not None:
        return scaled
    if len(args) != 2 or kwargs or not all(isinstance(each, Tensor) and each.is_floating_point() for each in args):
        return None
    a, b = args
    if a.shape != b.shape or a.requires_grad == b.requires_grad:
        return None
    return () if follows or _are_equal(a.detach(), b.detach()) else None


def _are_equal(a: Tensor, b: Tensor) -> bool:
    if not a.numel() or torch._C._functorch.is_functorch_wrapped_tensor(a):
        return False
    largest = b.abs().max()
    return bool((largest > 0) & ((a - b).abs().max() <= _ROUNDINGS * torch.finfo(a.dtype).eps * largest))


def _brought_apart(name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs:
        return _scaled_by_one(name, function, args, kwargs)
    a, b = args
    other = _APART * torch.sin((b if a.requires_grad else a).detach())  # another for each number
    return function(a, b) + other if name in _DIFFERENCES else function(a, b) * (1 + other)


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_TIMES, _Rule(_multiplied, _times_one)),
    **dict.fromkeys(_SCALED, _Rule(_scaled, _scaled_by_one)),
    **dict.fromkeys(_DIFFERENCES | _QUOTIENTS, _Rule(_cancelled, _brought_apart)),
    **dict.fromkeys(_CLAMPS, _Rule(_saturated, _let_through)),
    **dict.fromkeys(_LARGER, _Rule(_outdone, _sum_of_both)),
    "lerp": _Rule(_between, _halfway),
    "where": _Rule(_not_chosen, _both),
}


# ---- arguments, and where they are given


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.is_floating_point()


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, or few in a tensor of the user's own, that no gradient flows to."""
    if isinstance(value, (int, float)):
        return True
    if not isinstance(value, Tensor) or is_sequence(value) or value.requires_grad or value.is_complex():
        return False
    # Of torch.vmap and torch.func tensors show no numbers.
    return 0 < value.numel() <= _MOST_WEIGHTS and not torch._C._functorch.is_functorch_wrapped_tensor(value)


def users_place(frame: FrameType | None) -> tuple[str, int] | None:
    """Return the file and line of the user's that calls a function of torch; None where it is called by this package, or Lightning."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == "lightning_sp.preflight.recording.logged":
            return None  # what notes a number that is logged
        if name != "torch" and not name.startswith(("torch.", "lightning_sp.preflight.recording.")):
            ours = name.startswith(("lightning_sp.", "lightning.")) and not name.startswith("lightning_sp.models.")
            return None if ours else (frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None
