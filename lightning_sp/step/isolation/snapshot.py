"""Running a step that leaves no trace: random streams, weights, buffers, metrics, counters, lists, gradients and logs are as before.

Every plain attribute of every module is put back: tensors, arrays, numbers, what lists, dicts, sets and deques hold, and the attributes of
the user's own objects, nested ones too. That covers buffers, the states of torchmetrics wherever they are held, optimizers that a step
steps itself, caches built on first use, and what it appends. So is what it does to the run (`traces_in_run.py`), and what the user's code
keeps in classes, closures and globals (`users_code/kept_outside.py`). What libraries' other objects and files hold cannot be known and
stays. Hooks that a step registers go: transformers registers some on first use, notes so in an attribute, and would register them twice.

Elementwise dropout draws other masks on shards than on the whole, so it is switched off meanwhile.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from io import BytesIO, StringIO
from multiprocessing.sharedctypes import Synchronized
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_sp.context.streams import streams
from lightning_sp.parallelize import abandon_forward
from lightning_sp.step.isolation.data_sets import data_of_run, is_data_set, orders_of_run, tables_of
from lightning_sp.step.isolation.traces_in_run import undo_in_run
from lightning_sp.trainer.hooks.batch_hooks import of_user
from lightning_sp.users_code.contents import (
    kind_of_dict,
    put_attributes,
    put_elements,
    put_items,
    put_members,
    slots_of,
)
from lightning_sp.users_code.iterators import Copies, exchanged, takes_from_iterators
from lightning_sp.users_code.kept_outside import kept_outside
from lightning_sp.users_code.ownership import OF_THE_FRAMEWORK, is_class_of_user, is_object_of_user
from lightning_sp.users_code.random_generators import RandomGenerator, is_random_generator
from lightning_sp.weights.quantized import is_quantized

_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if "_hooks" in name and isinstance(value, dict))
# The elements of longer lists and dicts, a data set in memory, are not looked into; in an object, larger tensors and arrays are not copied.
MAX_VISITED = 10_000
MAX_BYTES = 1 << 26
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@contextmanager
def isolated(root: nn.Module, device: torch.device, *, logs: bool = False) -> Iterator[None]:
    """Put back everything about `root` and the random streams that the block changes, in so far as it can be known.

    Args:
        root: whose modules are watched.
        device: whose random stream is watched, besides the CPU's, Python's and numpy's.
        logs: whether its `log` and `log_dict` do what they do; else nothing.
    """
    with ExitStack() as undo:
        # Shards are put back; a parameter that is whole at either end would be memory that FSDP frees, or hold what the block wrote.
        abandon_forward(root)
        for parameter in root.parameters():
            undo.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
            if is_quantized(parameter):
                undo.callback(_restore_quantized, parameter, parameter.data, dict(vars(_quant_state(parameter))))
            else:
                undo.callback(_restore_shard, parameter, _shard(parameter).clone())
        undo.callback(abandon_forward, root)  # the block may be left by an error, or have caught one
        undo.enter_context(streams(device))
        trainer = getattr(root, "_trainer", None)
        undo.callback(snapshot(root, [] if trainer is None else of_user(trainer), hooks=True))
        # torch's dropout modules call these as well.
        for name in _DROPOUTS:
            undo.callback(setattr, F, name, getattr(F, name))
            setattr(F, name, _no_dropout)
        for name in () if logs else ("log", "log_dict"):
            if hasattr(root, name):
                setattr(root, name, _ignore)
        yield


def _shard(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of a parameter, in its memory: a target network's may be moved by the step itself."""
    whole = parameter.detach()
    return whole.to_local() if isinstance(whole, DTensor) else whole


def _restore_shard(parameter: nn.Parameter, before: Tensor) -> None:
    # Past its count of writes: a rank may run such a block alone.
    _shard(parameter).data.copy_(before)


def _quant_state(parameter: nn.Parameter) -> Any:
    """Return what bitsandbytes keeps beside the bytes of a 4-bit weight, or an object without attributes."""
    return getattr(parameter, "quant_state", None) or SimpleNamespace()


def _restore_quantized(parameter: nn.Parameter, data: Tensor, attributes: dict[str, Any]) -> None:
    """Put back a frozen weight that its own forward packs anew (bitsandbytes on CPUs in evaluation): its bytes are not written to."""
    parameter.data = data
    vars(_quant_state(parameter)).clear()
    vars(_quant_state(parameter)).update(attributes)


def snapshot(root: nn.Module, others: Sequence[Any] = (), *, hooks: bool = True) -> Callable[[], None]:
    """Return a function that puts the plain attributes of all modules back, and of other objects of the user's.

    Args:
        root: of the modules.
        others: the objects.
        hooks: whether hooks that were registered meanwhile go.
    """
    modules = list(root.modules())
    trainer = getattr(root, "_trainer", None)
    # The run's own optimizers step nothing in a trial.
    visited = {id(each) for each in (*modules, *others, *([] if trainer is None else trainer.optimizers))}
    undo, mutable = undo_in_run(root, trainer)
    copies: Copies = {}
    _remember_all(mutable, undo, visited, copies)
    for kept in kept_outside([*modules, *others]):
        undo.append(kept.put)
        if kept.exchange is not None and takes_from_iterators(kept.value):
            first, behind = exchanged(kept.value, copies)
            kept.exchange(first)
            undo.append(partial(kept.exchange, behind))
        _remember_all([kept.value], undo, visited, copies, of_object=True)
    for each in data_of_run(trainer):
        _remember_tables(each, undo, visited)
    for other in others:
        _remember_all(_remember_attributes(other, undo, copies), undo, visited, copies)
    for module in modules:
        _remember_all(_remember_attributes(module, undo, copies), undo, visited, copies)
        undo.append(partial(_restore_children, module, dict(module._modules)))
        for name in _HOOKS if hooks else ():
            undo.append(partial(_remove_new, vars(module)[name], set(vars(module)[name])))
    # Where nothing of the user's holds one, else it is put back as other objects are.
    for each in orders_of_run(trainer):
        _remember_tables(each, undo, visited)

    def restore() -> None:
        for each in undo:
            each()

    return restore


def random_generators(root: nn.Module) -> list[RandomGenerator]:
    """Return the random generators that the code of a module and of its trainer's callbacks keeps, in one order on all ranks."""
    trainer = getattr(root, "_trainer", None)
    owners = [*root.modules(), *([] if trainer is None else of_user(trainer))]
    waiting = [value for owner in owners for value in vars(owner).values()]
    waiting += [kept.value for kept in kept_outside(owners)]
    found, visited = [], {id(owner) for owner in owners}
    for value in waiting:  # which grows
        if id(value) in visited:
            continue
        visited.add(id(value))
        if is_random_generator(value):
            found.append(RandomGenerator(value))
        elif isinstance(value, (dict, list, tuple, deque)) and len(value) <= MAX_VISITED:
            waiting += value.values() if isinstance(value, dict) else value
        elif is_object_of_user(value):
            waiting += [
                *getattr(value, "__dict__", {}).values(),
                *(getattr(value, n) for n in slots_of(type(value)) if hasattr(value, n)),
            ]
    return found


def _remember_attributes(owner: Any, undo: list[Callable[[], object]], copies: Copies) -> list[Any]:
    """Add to `undo` what puts the attributes of an object back, and return their values."""
    slots = {name: getattr(owner, name) for name in slots_of(type(owner)) if hasattr(owner, name)}
    undo.extend(partial(setattr, owner, name, value) for name, value in slots.items())
    attributes = getattr(owner, "__dict__", {})
    watched = {name: value for name, value in attributes.items() if name not in OF_THE_FRAMEWORK}
    for name, value in watched.items():
        if takes_from_iterators(value):
            attributes[name], watched[name] = exchanged(value, copies)
    undo.append(partial(put_attributes, attributes, watched))
    return [*watched.values(), *slots.values()]


def _restore_children(module: nn.Module, before: dict[str, nn.Module | None]) -> None:
    """Put back the modules that a step has exchanged: BigBird takes another attention for good where it sees a short sequence."""
    if [*module._modules.items()] != [*before.items()]:
        module._modules.clear()
        module._modules.update(before)


def _remember_all(
    values: list[Any],
    undo: list[Callable[[], object]],
    visited: set[int],
    copies: Copies,
    *,
    of_object: bool = False,
) -> None:
    """Add to `undo` what puts the contents of mutable values back, and of those that they hold."""
    waiting = [(value, of_object) for value in values]
    while waiting:
        value, of_object = waiting.pop()
        if id(value) in visited:
            continue
        if is_data_set(value):
            _remember_tables(value, undo, visited)
            continue
        visited.add(id(value))
        is_object = is_object_of_user(value)
        children = _remember_attributes(value, undo, copies) if is_object or _has_attributes(value) else []
        children += _remember(value, undo, copies, of_object=of_object)
        # All of an optimizer's state is put back, as all of a weight is.
        of_object = (of_object or is_object) and not isinstance(value, Optimizer)
        waiting += [(child, of_object) for child in children]


def _remember_tables(owner: Any, undo: list[Callable[[], object]], visited: set[int]) -> None:
    """Add to `undo` what puts the attributes of a data set or data module back, and the tables that they may be."""
    if id(owner) in visited:
        return
    visited.add(id(owner))
    attributes = getattr(owner, "__dict__", {})
    undo.append(partial(put_attributes, attributes, dict(attributes)))
    for _, value in tables_of(owner):
        if id(value) not in visited:
            visited.add(id(value))
            _remember(value, undo, {}, of_object=True)


def _remember(value: Any, undo: list[Callable[[], object]], copies: Copies, *, of_object: bool) -> list[Any]:
    """Add to `undo` what puts the contents of a mutable value back, and return those that may be mutable."""
    children: list[Any] = []
    if isinstance(value, (Tensor, np.ndarray)):
        value = (
            value.to_local().detach() if isinstance(value, DTensor) and not isinstance(value, nn.Parameter) else value
        )
        if not isinstance(value, nn.Parameter) and not (of_object and _bytes(value) > MAX_BYTES):
            if isinstance(value, Tensor) and not value.is_meta and not _is_freed(value):
                undo.append(partial(_restore_tensor, value, value.detach().clone()))
            elif isinstance(value, np.ndarray) and value.flags.writeable and _bytes(value) <= MAX_BYTES:
                undo.append(partial(np.copyto, value, value.copy()))
    elif isinstance(value, dict):
        before = dict(kind_of_dict(value).items(value))
        children = list(before.values())
        for key, each in before.items() if len(before) <= MAX_VISITED else ():
            if takes_from_iterators(each):
                first, before[key] = exchanged(each, copies)
                kind_of_dict(value).__setitem__(value, key, first)
        undo.append(partial(put_items, value, before))
    elif isinstance(value, (list, deque)):
        sequence = children = list(value)
        if len(sequence) <= MAX_VISITED and any(map(takes_from_iterators, sequence)):
            put_elements(value, [exchanged(each, copies)[0] for each in children])
            sequence = [exchanged(each, copies)[1] for each in children]
        undo.append(partial(put_elements, value, sequence))
    elif isinstance(value, (StringIO, BytesIO)) and not value.closed:
        undo.append(partial(_rewrite, value, value.getvalue(), value.tell()))
    elif isinstance(value, (array, bytearray)):
        undo.append(partial(value.__setitem__, slice(None), value[:]))
    elif isinstance(value, SimpleQueue):
        undo.append(partial(_refill, value, _drained(value)))
        undo[-1]()
    elif isinstance(value, set):
        undo.append(partial(put_members, value, set(value)))
    elif isinstance(value, tuple):
        children = list(value)
    elif isinstance(value, partial):
        children = [*value.args, *value.keywords.values()]
    elif is_random_generator(value):
        undo.append(RandomGenerator(value))
    elif isinstance(value, Synchronized):
        undo.append(partial(setattr, value, "value", value.value))
    return children if len(children) <= MAX_VISITED else []


def _bytes(value: Tensor | np.ndarray[Any, Any]) -> int:
    return value.nbytes if isinstance(value, np.ndarray) else value.numel() * value.element_size()


def _is_freed(value: Tensor) -> bool:
    """Return whether a tensor is a view of a whole weight that FSDP2 has freed: `self.before = self.head.weight.data`."""
    return value.layout == torch.strided and value.numel() > 0 and not value.untyped_storage().size()


def _has_attributes(value: Any) -> bool:
    """Return whether a list, dict or set may have attributes, too: it has some, or is of a class of the user's."""
    kinds = (dict, list, set, deque)
    return isinstance(value, kinds) and (bool(getattr(value, "__dict__", None)) or is_class_of_user(type(value)))


def _restore_tensor(value: Tensor, before: Tensor) -> None:
    with torch.no_grad():
        if value.shape == before.shape:
            _once(value).copy_(_once(before, like=value))
        else:
            value.data = before


def _once(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a tensor without what it repeats, or another one repeats: torch writes to no `expand`."""
    for dim, stride in enumerate((tensor if like is None else like).stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _remove_new(hooks: dict[int, Any], before: set[int]) -> None:
    for each in hooks.keys() - before:
        del hooks[each]


def _rewrite(file: Any, text: str | bytes, place: int) -> None:
    """Give a file in memory back what it held, and its place."""
    file.seek(0)
    file.truncate()
    file.write(text)
    file.seek(place)


def _drained(queue: SimpleQueue[Any]) -> list[Any]:
    """Take all that a queue has, which cannot be looked at otherwise."""
    found = []
    with suppress(Empty):
        while True:
            found.append(queue.get_nowait())
    return found


def _refill(queue: SimpleQueue[Any], before: list[Any]) -> None:
    _drained(queue)
    for each in before:
        queue.put(each)


def _no_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return input


def _ignore(*_: Any, **__: Any) -> None:
    return None
