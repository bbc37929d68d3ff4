"""Which layer made a loss nan or infinite: the micro-batch runs once more, forward alone, with a hook on every module.

Nothing is watched before: a run whose losses are finite pays for one more number in a message that it sends anyway. A module is the first
when its forward ends before any other's with a nan or an infinity in its output; an inner module ends before those around it. Minus infinity
is what masks are made of, and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_sp import comm
from lightning_sp.parameter_names import shown, user_name
from lightning_sp.step.isolation.snapshot import isolated


@dataclass(frozen=True, kw_only=True)
class _NonFinite:
    """A module's output that is not finite, on this rank.

    Args:
        call: its place among the calls that have ended.
        module: its name.
        bad: numbers of the output that are nan or infinite.
        total: numbers of the output.
        inputs: whether some of what it was given was not finite either.
        parameters: its own that are not finite.
    """

    call: int
    module: str
    bad: int
    total: int
    inputs: bool
    parameters: tuple[str, ...]


def explain_non_finite(
    root: nn.Module, run: Callable[[], Tensor | None], device: torch.device, group: ProcessGroup | None
) -> str:
    """Run a step once more without a trace and return, in words, where its loss stopped to be finite. Every rank must call it.

    Args:
        root: the model.
        run: the step, forward; returns its loss.
        device: where it is.
        group: the world, on a backend for host objects.

    Communicates: what the step's forward does, and one gather of what each rank found.

    Raises:
        SequenceParallelError: it fails on this rank, and others wait for it in the middle of it.
    """
    found: list[_NonFinite] = []
    error, finite = None, True
    try:
        with isolated(root, device), torch.no_grad(), _watched(root, found):
            loss = run()
            finite = loss is None or bool(torch.isfinite(loss).all())
    except Exception as failure:  # whatever a step makes of its second run
        error = f"the micro-batch could not be run once more: {type(failure).__name__}: {failure}"
    if failures := comm.failures_of_all(error):
        return failures[0]
    every = comm.gather_objects((finite, found[0] if found else None), group)
    calls = [each for _, each in every if each is not None]
    if not calls:
        if all(each for each, _ in every):
            return "run once more it is finite: dropout, which is off then, or other random numbers have made it so"
        return "no module's output is nan or plus infinity: training_step itself makes it, or a module that gives minus infinity"
    first = min(calls, key=lambda each: each.call)
    alike = {rank: each for rank, (_, each) in enumerate(every) if each is not None and each.module == first.module}
    rank, shown_of = next(iter(alike.items()))
    name = first.module or "training_step's own module"
    others = f" (of {len(alike)} ranks that find it there)" if len(alike) > 1 else ""
    return (
        f"run once more, {name} is the first module whose output is not: {shown_of.bad} of {shown_of.total} numbers are nan or infinite on rank "
        f"{rank}{others}; {_cause(list(alike.values()))}"
    )


def _cause(found: Sequence[_NonFinite]) -> str:
    """Return what made it, of all ranks together: each looks at its own shard of the parameters."""
    if parameters := sorted({name for each in found for name in each.parameters}):
        return f"its {shown(parameters)} is not finite: an earlier update, or what was loaded, has made it so"
    if any(each.inputs for each in found):
        return "it was given numbers that are not finite: look at the batch, or at what the step computes before it"
    return "its inputs and its own parameters are finite: it overflows, or divides by 0"


@contextmanager
def _watched(root: nn.Module, found: list[_NonFinite]) -> Iterator[None]:
    """Note the first module whose output is not finite."""
    num_calls = 0

    def look(name: str, module: nn.Module, given: Any, output: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if found:
            return
        tensors = list(_floats(output))
        bad = sum(_num_bad(each) for each in tensors)
        if bad:
            own = [user_name(each) for each, value in module.named_parameters(recurse=False) if _num_bad(_local(value))]
            found.append(
                _NonFinite(
                    call=num_calls, module=name, bad=bad, total=sum(each.numel() for each in tensors), parameters=tuple(own),
                    inputs=any(_num_bad(each) for each in _floats(given)),
                )
            )  # fmt: skip

    def hook(name: str) -> Any:
        return lambda module, args, kwargs, output: look(name, module, (args, kwargs), output)

    hooks = [m.register_forward_hook(hook(user_name(n)), with_kwargs=True) for n, m in root.named_modules()]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def _floats(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of floating point in an output, however deep."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _floats(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _floats(each)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _floats(vars(value))


def _num_bad(tensor: Tensor) -> int:
    """Return how many numbers are nan or infinite; none where all of them are minus infinity, as in a mask."""
    tensor = _local(tensor.detach())
    bad = bool((torch.isnan(tensor) | (tensor == torch.inf)).any())
    return int((~torch.isfinite(tensor)).sum()) if bad else 0


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
