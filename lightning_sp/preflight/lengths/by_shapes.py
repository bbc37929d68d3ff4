"""What a step calls at a length that no run on one device can afford: known by shapes alone, without memory and without computing.

    crop of 4,096 tokens, tried                   {(model.py, 31, "mm"), (model.py, 33, "tanh"), ...}
    the batch's 8,192 tokens, by shapes           {(model.py, 31, "mm"), (model.py, 35, "cumsum"), ...}     model.py branches on the length

A rank sees 4,096 tokens of the 8,192, so that it would take the other branch, and no crop shows it. The step runs in a forked process, on
torch's fake tensors (`torch._subclasses.fake_tensor`): whatever it writes, caches or registers there is gone with the process.

Owns the runs and what they called; what follows from it is decided in `untried_length.py`.
"""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lightning_sp.errors import text_of

# A process that waits for a lock which a thread of its parent held at the fork would wait for ever.
LIMIT_S = 40.0
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_FRAMEWORKS = {"torch", "lightning", "lightning_sp", "lightning_utilities", "contextlib", "functools"}
_ITEM = torch.ops.aten._local_scalar_dense.default
_NUMBERS = (_ITEM, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default)


class Called(NamedTuple):
    """A function of torch that a step calls.

    Args:
        file: of the innermost line that is no framework's.
        line: its number.
        name: of the function, as ATen names it.
    """

    file: str
    line: int
    name: str


# What a run calls, with the fractions of Python's that each call is given.
Run = dict[Called, frozenset[float]]


class Calls(NamedTuple):
    """What some runs called.

    Args:
        runs: one for each run.
        failure: what ended them early, in words; None where all came to their end.
    """

    runs: list[Run]
    failure: str | None


def calls_by_shapes(module: nn.Module, runs: Sequence[Callable[[], Any]], *, limit_s: float = LIMIT_S) -> Calls:
    """Return what the runs call, in order; none of them leaves a trace. It communicates nothing.

    Args:
        module: its parameters and buffers are whole in these runs, and hold no numbers; no hook of it is called.
        runs: of a step, each on a batch of fake tensors: see `by_shape`.
        limit_s: for all of them.
    """
    if not hasattr(os, "fork"):
        return Calls([], "this system has no fork")
    reader, writer = os.pipe()
    # torch and Python warn of a fork beside threads: this one takes none of their locks, or is ended.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        _in_child(writer, module, runs)
    os.close(writer)
    try:
        found = _read(reader, limit_s)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if found is None:
        return Calls([], f"it did not end within {limit_s:.0f} s")
    named, failure = pickle.loads(found)  # of our own process
    return Calls([{Called(*each): frozenset(numbers) for each, numbers in run} for run in named], failure)


def by_shape(batch: Any) -> Any:
    """Return a batch of tensors without numbers, for a run of `calls_by_shapes`."""
    return tree_map(lambda each: torch.empty_like(each) if isinstance(each, Tensor) else each, batch)


def _in_child(writer: int, module: nn.Module, runs: Sequence[Callable[[], Any]]) -> None:
    """Run, send what was called, and end the process: nothing of the parent's is closed, flushed or joined."""
    called: list[dict[Called, set[float]]] = []
    failure = None
    warnings.simplefilter("ignore")
    try:
        torch.compiler.set_stance("force_eager")
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        with FakeTensorMode(allow_non_fake_inputs=True):
            _take_numbers(module)
            for each in runs:
                with _Calls() as seen:
                    each()
                called.append(seen.found)
    except BaseException as error:  # nothing may go on in this process
        failure = f"{type(error).__name__}: {text_of(error).strip().splitlines()[0] if text_of(error).strip() else ''}"
    try:
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(
                pickle.dumps(([[(tuple(call), found) for call, found in run.items()] for run in called], failure))
            )
    finally:
        os._exit(0)


def _read(reader: int, limit_s: float) -> bytes | None:
    """Return all that comes, None where nothing comes in time."""
    parts: list[bytes] = []
    with selectors.DefaultSelector() as selector:  # select itself takes no descriptor above 1,023
        selector.register(reader, selectors.EVENT_READ)
        while selector.select(limit_s):
            part = os.read(reader, 1 << 16)
            if not part:
                return b"".join(parts) or None
            parts.append(part)
    return None


def _take_numbers(module: nn.Module) -> None:
    """Give modules fake parameters and buffers, whole, in place of theirs, and no hooks: FSDP's would gather. The process ends with them."""
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in fakes:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            is_parameter = isinstance(tensor, nn.Parameter)
            fakes[id(tensor)] = nn.Parameter(made, requires_grad=tensor.requires_grad) if is_parameter else made
        return fakes[id(tensor)]

    for each in module.modules():
        if isinstance(each, FSDPModule):
            vars(each)["_get_fsdp_state"] = _Whole
        for name in _HOOKS:
            vars(each)[name] = type(vars(each)[name])()
        for kind in ("_parameters", "_buffers"):
            vars(each)[kind] = {name: fake(tensor) for name, tensor in vars(each)[kind].items()}


class _Whole:
    """In the place of FSDP's state, by which it gathers before a method that is no forward: `training_step`."""

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output


class _Calls(TorchDispatchMode):
    """Notes each function of ATen with the line that called it; a class because torch's modes are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[Called, set[float]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it; a collective ends the run, for the other ranks run none."""
        if "c10d" in func.namespace:
            raise RuntimeError(f"it calls {func}")
        if func.namespace not in ("prim", "profiler"):
            numbers = self.found.setdefault(Called(*_line(), func.overloadpacket.__name__), set())
            numbers.update(each for each in (*args, *(kwargs or {}).values()) if type(each) is float and each == each)
        if (
            func in _NUMBERS
        ):  # any number will do, the same at every length: a loss that is kept, a finite one that is asked for
            return 1.0 if func is _ITEM and args[0].is_floating_point() else 1 if func is _ITEM else True
        return func(*args, **(kwargs or {}))


def _line() -> tuple[str, int]:
    """Return file and line of the innermost frame that is no framework's."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _FRAMEWORKS:
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0
