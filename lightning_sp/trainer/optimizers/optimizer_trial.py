"""An optimizer tried on small weights, whole and sharded: whether it steps a shard as it steps the whole.

    ||shard's step - whole's step|| <= 5e-2 ||whole's step||        Muon orthogonalizes in bfloat16

Elementwise ones do. Others look at rows, columns or norms of a weight; some of these fail on sharded tensors (Adafactor, L-BFGS where
a shard is uneven), and one that unwraps shards itself would train wrongly without a word.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
)

from lightning_sp import comm
from lightning_sp.checkpoint import sharded_like
from lightning_sp.errors import text_of
from lightning_sp.mesh import tensor_parallel_part
from lightning_sp.parallelize import as_torch_does
from lightning_sp.trainer.optimizers.part_steps import step_only

# Each element's step is made of its own gradients alone.
ELEMENTWISE = {SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, RMSprop, ASGD, Adadelta}
_TOLERANCE = 5e-2
_STEPS = 2
_SEED = 1234


class Verdict(NamedTuple):
    """Of one trial."""

    fails: str | None = None  # why the optimizer cannot step shards
    untried: str | None = None  # why nothing is known


def verdict_on_shards(optimizer: Optimizer, group: ProcessGroup | None) -> Verdict:
    """Return whether an optimizer steps a shard as it steps the whole. It is left as it is. Every rank must call it.

    Args:
        optimizer: of sharded parameters.
        group: the world, on a backend for host objects.
    """
    if type(optimizer) in ELEMENTWISE:
        return Verdict()
    verdicts: list[Verdict] = comm.gather_objects(_trial(optimizer), group)
    return next((verdict for verdict in verdicts if verdict != Verdict()), Verdict())


def verdict_on_parts(optimizer: Optimizer, group: ProcessGroup | None) -> str | None:
    """Return why an optimizer cannot step its weights one after the other; None where that is its step of all, to the bit.

    It is left as it is. Every rank must call it. As `verdict_on_shards`.
    """
    if type(optimizer) in ELEMENTWISE:
        return None
    verdicts: list[str | None] = comm.gather_objects(_trial_of_parts(optimizer), group)
    return next(filter(None, verdicts), None)


def cuda_devices(optimizer: Optimizer) -> list[torch.device]:
    """Return the CUDA devices of an optimizer's parameters, whose random streams it may draw from."""
    return list({p.device for group in optimizer.param_groups for p in group["params"] if p.device.type == "cuda"})


def _trial(optimizer: Optimizer) -> Verdict:
    wholes, shards = _trial_parameters(optimizer)
    with torch.random.fork_rng(devices=cuda_devices(optimizer)):
        try:
            moved = _stepped(optimizer, wholes)
        except Exception as error:  # it cannot be made anew, or takes no such small weights: nothing is known
            return Verdict(untried=_first_line(error))
        try:
            with as_torch_does():
                moved_shards = _stepped(optimizer, shards)
        except Exception as error:  # whatever an operation on sharded tensors raises
            return Verdict(fails=_first_line(error))
    for whole, step, own in zip(_all(wholes), moved, moved_shards, strict=True):
        local, wanted = own.to_local(), sharded_like(step, own).to_local()
        apart, scale = float((local - wanted).double().norm()), float(step.double().norm())
        if not apart <= _TOLERANCE * scale + 1e-12:
            return Verdict(fails=f"it moves a weight of shape {tuple(whole.shape)} otherwise than the whole one")
    return Verdict()


def _trial_of_parts(optimizer: Optimizer) -> str | None:
    steps = []
    with torch.random.fork_rng(devices=cuda_devices(optimizer)):
        for in_parts in (False, True):
            wholes, _ = _trial_parameters(optimizer)
            try:
                steps.append(_stepped(optimizer, wholes, _step_each if in_parts else _step_all))
            except (
                Exception
            ) as error:  # whatever a step without a closure, or an optimizer that cannot be made anew, raises
                return f"it could not be tried on small weights ({_first_line(error)})"
    at_once, apart = steps
    for whole, part in zip(at_once, apart, strict=True):
        if not torch.equal(whole, part):
            return f"it moves a weight of shape {tuple(whole.shape)} otherwise when others are stepped after it"
    return None


def _step_all(optimizer: Optimizer) -> None:
    optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type, return-value]


def _step_each(optimizer: Optimizer) -> None:
    for each in [each for group in optimizer.param_groups for each in group["params"]]:
        step_only(optimizer, optimizer.step, {each})


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {text_of(error).splitlines()[0] if text_of(error) else ''}"


def _trial_parameters(optimizer: Optimizer) -> tuple[list[list[nn.Parameter]], list[list[nn.Parameter]]]:
    """Return small parameters for each group, whole and sharded, of the dims and placements of the group's own; with gradients for each step."""
    generator = torch.Generator().manual_seed(_SEED)
    wholes, shards = [], []
    for group in optimizer.param_groups:
        own, split = [], []
        found = {(p.dim(), p.placements): p for p in group["params"] if isinstance(p, DTensor) and p.dim()}
        for like in found.values():
            ranks, (parts, dim) = like.device_mesh.size(), tensor_parallel_part(like)
            # Of a split layer each part has equally many rows or columns.
            of_rows, of_columns = (parts if dim == 0 else 1), (2 * parts if dim else 3)
            for rows in (2 * ranks * of_rows, (2 * ranks + 1) * of_rows):
                shape = (rows, *(of_columns,) * (like.dim() - 1))
                value = torch.randn(shape, generator=generator).to(like.device, like.dtype)
                own.append(nn.Parameter(value))
                split.append(nn.Parameter(sharded_like(value, _of_shape(like, value))))
        wholes.append(own)
        shards.append(split)
    return wholes, shards


def _of_shape(like: DTensor, value: Tensor) -> DTensor:
    """Return a tensor of a value's shape, sharded as another."""
    return torch.distributed.tensor.empty(
        *value.shape, dtype=value.dtype, device_mesh=like.device_mesh, placements=like.placements
    )


def _stepped(
    optimizer: Optimizer, groups: list[list[nn.Parameter]], step: Callable[[Optimizer], None] = _step_all
) -> list[Any]:
    """Step an optimizer like another over other parameters, and return how far each has moved."""
    copied = _like(optimizer, groups)
    parameters = _all(groups)
    before = [p.detach().clone() for p in parameters]
    generator = torch.Generator().manual_seed(_SEED + 1)
    torch.manual_seed(_SEED)
    for _ in range(_STEPS):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
            parameter.grad = sharded_like(gradient, parameter)
        with torch.compiler.set_stance("force_eager"):  # small weights are not worth a compiler's minutes (torchao)
            step(copied)
    return [p.detach() - old for p, old in zip(parameters, before, strict=True)]


def _like(optimizer: Optimizer, groups: list[list[nn.Parameter]]) -> Optimizer:
    """Return the same optimizer over other parameters, with a state of its own.

    Raises:
        TypeError: it is neither made of its defaults alone, as torch's are, nor can be copied without the user's parameters.
    """
    own_groups = [{**group, "params": own} for group, own in zip(optimizer.param_groups, groups, strict=True) if own]
    try:
        return type(optimizer)(own_groups, **optimizer.defaults)
    except TypeError:
        if not _can_be_copied(optimizer):
            raise
    copied: Optimizer = object.__new__(type(optimizer))
    hooks: dict[str, Any] = {
        name: OrderedDict() for name, value in vars(optimizer).items() if "_hooks" in name and isinstance(value, dict)
    }
    others = {name: value for name, value in vars(optimizer).items() if name != "step"}
    vars(copied).update({**others, **hooks, "state": defaultdict(dict), "param_groups": own_groups})
    return copied


def _can_be_copied(optimizer: Optimizer) -> bool:
    """Return whether a copy would move nothing of the user's: what wraps another optimizer, or keeps parameters of its own, would."""
    held = [value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")]
    return not any(map(_holds_parameters, held))


def _holds_parameters(value: Any) -> bool:
    return any(isinstance(each, (Optimizer, nn.Parameter, nn.Module)) for each in _flat(value))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple, set)):
        yield from (leaf for each in value for leaf in _flat(each))
    elif isinstance(value, dict):
        yield from (leaf for pair in value.items() for each in pair for leaf in _flat(each))
    else:
        yield value


def _all(groups: list[list[Any]]) -> list[Any]:
    return [each for group in groups for each in group]
