"""What a step leaves in plain attributes of the user's modules, as numbers: what a later step reads of them is no buffer that is compared."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_sp import comm
from lightning_sp.global_view.tensors.sequence_tensor import GlobalTensor
from lightning_sp.parameter_names import user_name
from lightning_sp.step.isolation.data_sets import data_of_run, is_data_set, orders_of_run, tables_of
from lightning_sp.step.isolation.snapshot import MAX_BYTES, MAX_VISITED
from lightning_sp.trainer.hooks.batch_hooks import of_user
from lightning_sp.trainer.hooks.hook_reads import read_in_hooks
from lightning_sp.users_code.kept_outside import kept_outside
from lightning_sp.users_code.ownership import OF_THE_FRAMEWORK, is_object_of_user, key_text

# Behind a name, in messages.
ATTRIBUTE = " (attribute)"
# Classes of these hold what they count by shapes, caches say.
_LIBRARIES = {
    "torch",
    "transformers",
    "peft",
    "torchmetrics",
    "lightning",
    "lightning_fabric",
    "builtins",
    "abc",
    "typing",
}


_CONTAINERS = (list, tuple, deque, dict, set, frozenset)
_PAIR = 8
# Keys that are longer, or larger, are no lengths or names.
_LONG_KEY, _LARGE_KEY = 32, 2**20
# Arrays in longer lists are samples: they have no count of writes, and would be copied.
_MOST_ARRAYS = 64
# Bytes of a number that torch has: numpy's long doubles are wider.
_WIDEST = 8
# A tensor's number is its norm, and a sum of its numbers by a pattern over this.
_PARTS = 6


class _TensorVersion(NamedTuple):
    """A tensor in a list or dict: not copied, for there may be many."""

    tensor: Tensor
    version: int


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the numbers and tensors in attributes of the user's modules, by the name that a user would write; tensors copied, but for
    those in lists and dicts."""
    all_of_them = list(_all_attributes(module))
    found: dict[str, Any] = {
        name: _without_copy(value) for name, value in chain(_entries(all_of_them), _buffers(module))
    }
    found.update(
        {name: v.detach().clone() if isinstance(v, Tensor) else _array(v) for name, v in all_of_them if _is_number(v)}
    )
    return found


def numbers_left(module: nn.Module) -> dict[str, float]:
    """Return the single numbers that later steps and hooks may go by: in attributes, lists and dicts of the user's modules and callbacks, in
    buffers, in the optimizers' groups, and of the run."""
    found: dict[str, Any] = dict(module.named_buffers())
    for name, value in _all_attributes(module):
        found[name] = value
        if isinstance(value, (list, tuple, deque, dict)) and len(value) <= MAX_VISITED:
            found |= {
                f"{name}[{key_text(key)}]": v
                for key, v in (value.items() if isinstance(value, dict) else enumerate(value))
            }
    trainer = getattr(module, "_trainer", None)
    if trainer is not None:
        groups = enumerate(group for each in trainer.optimizers for group in each.param_groups)
        found |= {f"{option} of group {i}": value for i, group in groups for option, value in group.items()}
        found["should_stop"] = trainer.should_stop
    return {name: float(value) for name, value in found.items() if _is_single(value)}


def _is_single(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and _is_number(value) and not isinstance(value, GlobalTensor)
    return isinstance(value, (bool, int, float))


def changed_attributes(
    module: nn.Module, before: Mapping[str, Any], control_group: ProcessGroup | None, *, evaluates: bool
) -> dict[str, float]:
    """Return what has changed since, each as one number: a tensor's norm, its shape in the name. Every rank must call it.

    Args:
        module: the same.
        before: of `attributes_of`.
        control_group: the world, on a backend for host objects: a tensor of the global view that some ranks do not have is left out.
        evaluates: a tensor of the LightningModule is named without its shape, and so compared where that is a part's: a hook at the
            epoch's end may read it. Of training those alone that some hook names. What layers keep of their tokens is their own.
    """
    found = {}
    trainer = getattr(module, "_trainer", None)
    read = frozenset() if trainer is None or evaluates else read_in_hooks(trainer)
    all_of_them = list(_all_attributes(module))
    numbers = ((name, value) for name, value in all_of_them if _is_number(value))
    buffers = _buffers(module) if evaluates else ()  # training compares each buffer as what it is
    now_there = {name: _array(value) for name, value in chain(numbers, _entries(all_of_them), buffers)}
    shown = {name for name, value in now_there.items() if isinstance(value, GlobalTensor)}
    of_all = set.intersection(*comm.gather_objects(shown, control_group))
    for name, value in now_there.items():
        if isinstance(value, GlobalTensor) and name not in of_all:
            continue  # its norm is all ranks' work
        old = before.get(name)
        if isinstance(old, _TensorVersion):
            now = _without_copy(value)
            if isinstance(now, _TensorVersion) and now.tensor is old.tensor and now.version == old.version:
                continue
            old = None
        if isinstance(value, Tensor):
            if not _is_equal(value, old):
                for_hooks = name.count(".") == 1 and "[" not in name and (evaluates or name.partition(".")[2] in read)
                shape = f" of shape {tuple(value.shape)}" if value.dim() and not for_hooks else ""
                found[f"{name}{shape}{ATTRIBUTE}"] = number_of(value)
        elif value != old:
            found[f"{name}{ATTRIBUTE}"] = float(value)
    return found


def _is_equal(value: Tensor, old: Any) -> bool:
    if not isinstance(old, Tensor) or value.shape != old.shape:
        return False
    if isinstance(value, GlobalTensor) or isinstance(old, GlobalTensor):  # of two steps, each with its own places
        return number_of(value) == number_of(old)
    return torch.equal(value, old)


def number_of(value: Tensor) -> float:
    """Return a number that tells tensors apart: those of normalised tokens have one norm, whichever tokens they are."""
    if value.numel() == 1:
        return float(value.detach())
    found = value.detach().double()
    weighed = found
    for dim, size in enumerate(found.shape):
        shape = [1] * found.dim()
        shape[dim] = size
        weighed = weighed * _pattern(size).to(found.device).view(shape)
    # The norm is the larger part, so that rounding stays small beside the whole.
    return float(found.norm()) + float(weighed.sum()) / _PARTS


def _pattern(size: int) -> Tensor:
    """Return numbers of either sign without a period, from 0.5 to 1.5."""
    places = torch.arange(1, size + 1, dtype=torch.float64)
    return (0.5 + (places * 2**0.5).frac()) * torch.where((places * 3**0.5).frac() < 0.5, 1.0, -1.0).double()


def _without_copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _TensorVersion(value, 0 if value.is_inference() else value._version)
    return _array(value)


def _array(value: Any) -> Any:
    """Return an array of numpy's as a tensor of its own; other values as they are."""
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


def _entries(attributes: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and tensors that lists, dicts and sets in attributes hold, and how many elements each has."""
    for name, value in attributes:
        if isinstance(value, _CONTAINERS):
            yield f"len({name})", len(value)
            if isinstance(value, (dict, set, frozenset)) and (keys := _of_contents(value)):
                yield f"contents({name})", keys
            if len(value) <= MAX_VISITED:
                yield from _elements(name, value)


def _of_contents(keys: Iterable[Any]) -> int:
    """Return a number of those keys that are made of tokens: bytes, long texts and tuples, hashes. A cache's keys are lengths, say."""
    found = 0
    for key in keys:
        is_long = isinstance(key, (str, tuple)) and len(key) > _LONG_KEY
        if is_long or isinstance(key, bytes) or (isinstance(key, int) and abs(key) > _LARGE_KEY):
            found += crc32(repr(key).encode())
    return found


def _elements(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (set, frozenset)):
        value = sorted(each for each in value if isinstance(each, (int, float)))
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(each, np.ndarray) and len(value) > _MOST_ARRAYS:
            continue
        if _is_number(each):
            yield f"{name}[{key_text(key)}]", each
        elif isinstance(each, (list, tuple)) and len(each) <= _PAIR:  # numbers that are kept together
            yield from ((f"{name}[{key_text(key)}][{i}]", part) for i, part in enumerate(each) if _is_number(part))


def _all_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of the user's modules and of the user's callbacks, which hooks of modules may fill, and what is kept outside."""
    yield from _outside(module)
    trainer = getattr(module, "_trainer", None)
    for each in [] if trainer is None else of_user(trainer):
        yield from ((f"{type(each).__name__}.{name}", value) for name, value in vars(each).items())
    for each in (*data_of_run(trainer), *orders_of_run(trainer)):
        yield from ((f"{type(each).__name__}.{name}", value) for name, value in tables_of(each))
    for prefix, each in _modules_of_user(module):
        for name, value in vars(each).items():
            if name not in OF_THE_FRAMEWORK and name != "_buffers":
                yield f"{prefix}.{name}", value
                yield from ((f"{prefix}.{name}.{n}", v) for n, v in _inside(value))


def _buffers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for prefix, each in _modules_of_user(module):
        yield from ((f"{prefix}.{name}", value) for name, value in each._buffers.items() if _is_number(value))


def _modules_of_user(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, each in module.named_modules():
        is_of_library = all(base.__module__.partition(".")[0] in _LIBRARIES for base in type(each).__mro__)
        if not (is_of_library or isinstance(each, Metric)):  # what metrics hold is compared as what they show
            yield ".".join(["self", *([user_name(path)] if path else [])]), each


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object of the user's own, and what may be a table in a data set."""
    if is_data_set(value):
        yield from tables_of(value)
    elif not isinstance(value, (Metric, nn.Module)) and is_object_of_user(value):
        for name, each in getattr(value, "__dict__", {}).items():
            if not (isinstance(each, Tensor) and each.nbytes > MAX_BYTES):  # no trial puts it back
                yield name, each


def _outside(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what functions of the user's modules and callbacks close over, and what their files and classes keep: numbers, lists, dicts,
    arrays, tensors that a trial puts back."""
    trainer = getattr(module, "_trainer", None)
    owners = [*module.modules(), *([] if trainer is None else of_user(trainer))]
    for name, value in ((each.name, each.value) for each in kept_outside(owners)):
        is_small = isinstance(value, Tensor) and value.nbytes <= MAX_BYTES and not isinstance(value, nn.Parameter)
        if is_small or isinstance(value, (int, float, np.ndarray, *_CONTAINERS)):
            yield name, value
        yield from ((f"{name}.{n}", v) for n, v in _inside(value))


def _is_number(value: Any) -> bool:
    if isinstance(value, (bool, DTensor, nn.Parameter)):
        return False
    if isinstance(value, np.ndarray):
        is_written = value.flags.writeable and not isinstance(value, np.memmap) and value.nbytes <= MAX_BYTES
        return is_written and value.dtype.kind in "biuf" and value.dtype.isnative and value.dtype.itemsize <= _WIDEST
    return isinstance(value, (int, float)) or (
        isinstance(value, Tensor) and not value.is_complex() and not value.is_meta
    )
