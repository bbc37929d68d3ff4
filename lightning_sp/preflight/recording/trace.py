"""Every call of a step, whole or on shards, in short: what went in and what came out, one number for each token.

(rows, tokens, ...)  ->  (rows, tokens)        a projection of the rest, so that a layer of any width is a few numbers
(n, ...)             ->  (n, 1)                of rows, perhaps
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.tensor import DTensor
from torch.nn.attention import flex_attention as torch_flex
from torch.overrides import TorchFunctionMode

from lightning_sp.preflight.comparison import plain_name
from lightning_sp.weights.autocast import numbers_of

# One call of ours takes the place of one of torch's: what either calls inside is its own.
_ATOMIC = ((F, "scaled_dot_product_attention"), (F, "cross_entropy"), (torch_flex, "flex_attention"))
# They make or read no value of a token.
_SILENT = {
    "__get__",
    "size",
    "dim",
    "numel",
    "stride",
    "is_contiguous",
    "item",
    "tolist",
    "__repr__",
    "__bool__",
    "__len__",
    "backward",
    "detach",
}


class Key(NamedTuple):
    """A call: in which module, of which function (empty for the module's own forward), and its number among those."""

    module: str
    function: str
    number: int


class Summary(NamedTuple):
    """A tensor in short: the dim that its tokens lie along, None for none; one number for each row and token."""

    dim: int | None
    values: Tensor
    integral: bool


@dataclass(frozen=True, kw_only=True)
class Event:
    """A call, with what went in and what came out.

    Args:
        key: which.
        kind: the module's class.
        inputs: its tensors.
        outputs: likewise.
        numbers: plain numbers among its arguments.
    """

    key: Key
    kind: str
    inputs: tuple[Summary, ...]
    outputs: tuple[Summary, ...]
    numbers: tuple[float, ...] = ()


@dataclass(kw_only=True)
class Trace:
    """The calls of one run, in the order in which they end.

    Args:
        rows: of the batch.
        tokens: of each row.
        like: the trace of the whole run: tokens lie along the same dims; None in that one.
        captured: results that are to be kept as they are, by call.
        replaced: results that calls are to return instead of their own.
    """

    rows: int
    tokens: int
    like: Trace | None = None
    captured: dict[Key, Any] = field(default_factory=dict)
    replaced: dict[Key, Any] = field(default_factory=dict)
    events: dict[Key, Event] = field(default_factory=dict)

    def note(self, key: Key, kind: str, inputs: Any, output: Any) -> Any:
        """Note a call, and return its result, or what replaces it."""
        if key in self.captured:
            # Copies: FSDP frees what a view of a parameter would show.
            self.captured[key] = apply_to_collection(output, Tensor, lambda tensor: numbers_of(tensor).detach().clone())
        output = self.replaced.get(key, output)
        before = None if self.like is None else self.like.events.get(key)
        flat, numbers = _tensors(inputs)
        self.events[key] = Event(
            key=key,
            kind=kind,
            inputs=self._summaries(flat, None if before is None else before.inputs),
            outputs=self._summaries(_tensors(output)[0], None if before is None else before.outputs),
            numbers=tuple(numbers),
        )
        return output

    def _summaries(self, tensors: list[Tensor], before: tuple[Summary, ...] | None) -> tuple[Summary, ...]:
        dims = [None] * len(tensors) if before is None or len(before) != len(tensors) else [each.dim for each in before]
        return tuple(summary(each, self.rows, self.tokens, dim) for each, dim in zip(tensors, dims, strict=True))


def summary(tensor: Tensor, rows: int, tokens: int, hint: int | None = None) -> Summary:
    """Return a tensor in short; its tokens lie along `hint` if that has as many, else along the first dim that has."""
    x = numbers_of(tensor).detach()
    integral = not (x.is_floating_point() or x.is_complex())
    x = (torch.view_as_real(x) if x.is_complex() else x).double().nan_to_num(0.0, 0.0, 0.0)
    shape = tuple(x.shape)
    if shape and shape[0] == rows * tokens and tokens > 1:
        return Summary(0, _project(x.reshape(rows, tokens, -1)), integral)
    found = [dim for dim, size in enumerate(shape) if size == tokens and (dim > 0 or rows != tokens)]
    dim = hint if hint in found else next(iter(found), None)
    if dim is not None and dim > 0 and shape[0] == rows:
        return Summary(dim, _project(x.movedim(dim, 1).reshape(rows, tokens, -1)), integral)
    if dim is not None:
        return Summary(dim, _project(x.movedim(dim, 0).reshape(1, tokens, -1)), integral)
    return Summary(None, _project(x.reshape(shape[0] if shape and x.numel() else 1, 1, -1)), integral)


def _project(x: Tensor) -> Tensor:
    width = torch.arange(x.shape[-1], device=x.device, dtype=torch.float64)
    return (x @ torch.cos(width * 1.7 + 0.3)).cpu()


def _tensors(value: Any) -> tuple[list[Tensor], list[float]]:
    """Return the tensors and the plain numbers of nested arguments."""
    tensors: list[Tensor] = []
    numbers: list[float] = []
    pending = [value]
    while pending:
        each = pending.pop(0)
        if isinstance(each, Tensor):
            if _has_numbers(each):
                tensors.append(each)
        elif isinstance(each, (int, float)) and not isinstance(each, bool):
            numbers.append(float(each))
        elif isinstance(each, dict):
            pending[:0] = list(each.values())
        elif isinstance(each, (list, tuple)):
            pending[:0] = list(each)
        elif isinstance(each, slice):
            pending[:0] = [each.start, each.stop, each.step]
    return tensors, numbers


def _has_numbers(tensor: Tensor) -> bool:
    """Return whether there are numbers behind a tensor, on all ranks.

    Those within `torch.vmap` or another transform have none, nor those that a function is traced with (`torch.func.linearize`). A sharded
    weight has some on other ranks: whoever compares them is alone in that.
    """
    sharded = isinstance(tensor, DTensor) or hasattr(tensor, "is_term")
    return not (sharded or torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor.is_meta or is_fake(tensor))


def _is_of_weights(output: Any) -> bool:
    """Return whether a function gave what is sharded: made of weights, it has no tokens, whatever its sizes are."""
    return isinstance(output, DTensor) or hasattr(output, "is_term")


class _Functions(TorchFunctionMode):
    """Notes every function of torch."""

    def __init__(self, trace: Trace, stack: list[tuple[str, str]]) -> None:
        super().__init__()
        self.trace, self.stack = trace, stack
        self.counts: Counter[tuple[str, str]] = Counter()
        self.paused = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if self.paused or name in _SILENT or not _tensors(output)[0] or _is_of_weights(output):
            return output
        return self.note(name, (args, kwargs or {}), output)

    def note(self, name: str, inputs: Any, output: Any) -> Any:
        module, kind = self.stack[-1]
        number = self.counts[module, name]
        self.counts[module, name] += 1
        with torch._C.DisableTorchFunction():
            return self.trace.note(Key(module, name, number), kind, inputs, output)


@contextmanager
def traced(root: nn.Module, trace: Trace) -> Iterator[None]:
    """Note every call of a step of `root` into a trace."""
    stack = [("", type(root).__name__)]
    functions = _Functions(trace, stack)
    with ExitStack() as undo, torch.no_grad():
        for name, module in root.named_modules():
            enter, leave = _hooks(plain_name(name), functions, stack)
            undo.callback(module.register_forward_pre_hook(enter).remove)
            undo.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
        for holder, name in _ATOMIC:
            original = getattr(holder, name)
            undo.callback(setattr, holder, name, original)
            setattr(holder, name, _atomic(name, original, functions))
        with functions:
            yield


def _hooks(
    name: str, functions: _Functions, stack: list[tuple[str, str]]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    numbers: list[int] = []

    def enter(module: nn.Module, _: Any) -> None:
        stack.append((name, type(module).__name__))

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        stack.pop()
        numbers.append(0)
        with torch._C.DisableTorchFunction():
            return functions.trace.note(Key(name, "", len(numbers) - 1), type(module).__name__, (args, kwargs), output)

    return enter, leave


def _atomic(name: str, original: Callable[..., Any], functions: _Functions) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        functions.paused += 1
        try:
            output = original(*args, **kwargs)
        finally:
            functions.paused -= 1
        return output if functions.paused else functions.note(name, (args, kwargs), output)

    return call
