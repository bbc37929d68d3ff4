"""The tensors that a user's score or mask function reads, found in its closure, and the same function with other tensors.

Searched: the variables of enclosing functions, defaults, globals that are tensors or functions, partials, the attributes of an object or module
that the function's code names, and the elements of tuples, lists and dicts.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_sp.attention.spec.positions import ScorePositions
from lightning_sp.attention.spec.score_mod import ScoreMod
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError


def closure_tensors(value: Any, name: str = "") -> dict[str, Tensor]:
    """Return the tensors that a function reads, by the path where each was found."""
    return dict(_walk(value, name or getattr(value, "__qualname__", type(value).__name__), (), set()))


def check_whole_tensors(context: SequenceContext, function: Callable[..., Any], what: str) -> None:
    """Refuse a function of positions that reads tensors of this rank's tokens: it is called with global positions.

    Raises:
        SequenceParallelError: a tensor has a dimension of the shard's length.
    """
    step = context.step
    assert step is not None
    if context.mesh.layout.size == 1:
        return
    tensors = closure_tensors(function)
    for sequence in step.batch.sequences:
        local = context.local_tokens(sequence)
        short = {name: tuple(t.shape) for name, t in tensors.items() if local in t.shape}
        if not short:
            continue
        raise SequenceParallelError(
            f"{what} reads {', '.join(f'{name} of shape {shape}' for name, shape in short.items())}, of this rank's {local} of "
            f"{sequence.length} tokens, and is asked for positions in the whole sequence: make it of tensors of the whole sequence (a batch "
            "entry that is no sequence passes whole), or of positions alone; documents go by position_ids, padding by attention_mask"
        )


def clamp_to_real_tokens(
    function: Callable[..., Tensor], queries: SequenceInfo, keys: SequenceInfo
) -> Callable[..., Tensor]:
    """Return a user's function of (..., query, key) that is never called with a position of our padding: its tensors may be no longer than S.

    It gets the last token's position instead: no token sees padding, and a padding query's output is thrown away.
    """
    if all(each.padded_length == each.length for each in (queries, keys)):
        return function
    last, last_key = queries.length - 1, keys.length - 1

    def clamped(*arguments: Tensor) -> Tensor:
        *others, query, key = arguments
        return function(*others, query.clamp(max=last), key.clamp(max=last_key))

    return clamped


def learned_score_mod(
    function: Callable[..., Tensor], like: Tensor, sequences: tuple[SequenceInfo, SequenceInfo] | None = None
) -> ScoreMod:
    """Return a user's score function with its learned tensors as arguments, so that they get their gradients.

    Args:
        function: (score, row, head, query, key) -> score.
        like: queries, for device and dtype.
        sequences: those of queries and keys in the step in progress, None outside of one.

    Raises:
        SequenceParallelError: it needs the gradient of a tensor that was not found in its closure.
    """
    learned = list({id(t): t for t in closure_tensors(function).values() if t.requires_grad}.values())
    ids = [id(tensor) for tensor in learned]

    def with_tensors(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor, *tensors: Tensor) -> Tensor:
        rebuilt = rebuild(function, dict(zip(ids, tensors, strict=True)))
        rebuilt = rebuilt if sequences is None else clamp_to_real_tokens(rebuilt, *sequences)
        changed: Tensor = rebuilt(score, row, head, query, key)
        return changed

    score_mod = ScoreMod(with_tensors, *learned)
    zero = torch.arange(1, device=like.device)
    with torch.enable_grad():
        tried = score_mod.apply(
            like.new_zeros(1, 1, 1, 1), ScorePositions((0, 1), (0, 1), zero, zero), tuple(t.detach() for t in learned)
        )
    if tried.requires_grad:
        raise SequenceParallelError(
            f"score function {getattr(function, '__qualname__', function)} learns by a tensor that is none of those found in it, "
            f"{[tuple(t.shape) for t in learned]}: its gradient would be lost; let the function read it as a variable of the enclosing function"
        )
    return score_mod


def rebuild(value: Any, others: dict[int, Tensor]) -> Any:
    """Return a function that reads other tensors, given by the ids of those that it reads; the rest of its closure is shared."""
    return _rebuilt(value, others, (), {}) if others else value


def _walk(value: Any, path: str, names: tuple[str, ...], visited: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
        return
    if id(value) in visited:
        return
    visited.add(id(value))
    for name, part, attributes in _parts(value, names):
        yield from _walk(part, f"{path}.{name}", attributes, visited)


def _parts(value: Any, names: tuple[str, ...]) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yield the (name, value, names of its attributes that may be read) of each part of a value."""
    if isinstance(value, types.FunctionType):
        code_names = value.__code__.co_names
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if _filled(cell):
                yield name, cell.cell_contents, code_names
        yield from ((f"default {i}", part, code_names) for i, part in enumerate(value.__defaults__ or ()))
        yield from ((name, part, code_names) for name, part in (value.__kwdefaults__ or {}).items())
        for name in code_names:
            if isinstance(found := value.__globals__.get(name), (Tensor, types.FunctionType)):
                yield name, found, code_names
    elif isinstance(value, types.MethodType):
        yield "__func__", value.__func__, ()
        yield "__self__", value.__self__, value.__func__.__code__.co_names
    elif isinstance(value, functools.partial):
        yield "func", value.func, ()
        yield from ((str(i), part, names) for i, part in enumerate(value.args))
        yield from ((name, part, names) for name, part in value.keywords.items())
    elif isinstance(value, (list, tuple)):
        yield from ((str(i), part, names) for i, part in enumerate(value))
    elif isinstance(value, dict):
        yield from ((str(name), part, names) for name, part in value.items())
    elif not isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType, str, int, float)):
        call = next((vars(each)["__call__"] for each in type(value).__mro__ if "__call__" in vars(each)), None)
        code_names = (*names, *(call.__code__.co_names if isinstance(call, types.FunctionType) else ()))
        for name in code_names:
            found = _attribute(value, name)
            if isinstance(found, (Tensor, torch.nn.Module, list, tuple, dict)):
                yield name, found, code_names


def _attribute(value: Any, name: str) -> Any:
    """Return an object's own attribute, None for a method or property, which would run."""
    own = vars(value) if hasattr(value, "__dict__") else {}
    for attributes in (own, *(own.get(kind) or {} for kind in ("_parameters", "_buffers", "_modules"))):
        if isinstance(attributes, dict) and name in attributes:
            return attributes[name]
    return None


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable of the enclosing function that is not set yet
        return False


def _rebuilt(value: Any, others: dict[int, Tensor], names: tuple[str, ...], made: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    if id(value) in made:
        return made[id(value)]
    if not any(id(tensor) in others for tensor in dict(_walk(value, "", names, set())).values()):
        return value
    if isinstance(value, types.FunctionType):
        return _rebuilt_function(value, others, made)
    if isinstance(value, types.MethodType):
        code_names = value.__func__.__code__.co_names
        return types.MethodType(
            _rebuilt(value.__func__, others, (), made), _rebuilt(value.__self__, others, code_names, made)
        )
    if isinstance(value, functools.partial):
        args = [_rebuilt(part, others, names, made) for part in value.args]
        keywords = {name: _rebuilt(part, others, names, made) for name, part in value.keywords.items()}
        return functools.partial(_rebuilt(value.func, others, (), made), *args, **keywords)
    if isinstance(value, (list, tuple)):
        parts = [_rebuilt(part, others, names, made) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {name: _rebuilt(part, others, names, made) for name, part in value.items()}
    attributes = {name: _rebuilt(part, others, read, made) for name, part, read in _parts(value, names)}
    return _WithTensors(value, attributes)


def _rebuilt_function(function: types.FunctionType, others: dict[int, Tensor], made: dict[int, Any]) -> Any:
    code_names = function.__code__.co_names
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    own_globals = dict(function.__globals__)
    again = types.FunctionType(function.__code__, own_globals, function.__name__, None, cells or None)
    made[id(function)] = again  # before its parts: a function may read itself
    for cell, old in zip(cells, function.__closure__ or (), strict=True):
        if _filled(old):
            cell.cell_contents = _rebuilt(old.cell_contents, others, code_names, made)
    again.__defaults__ = _rebuilt(function.__defaults__, others, code_names, made)
    again.__kwdefaults__ = _rebuilt(function.__kwdefaults__, others, code_names, made)
    for name in code_names:
        if isinstance(found := own_globals.get(name), (Tensor, types.FunctionType)):
            own_globals[name] = _rebuilt(found, others, code_names, made)
    return again


class _WithTensors:
    """A module or object whose attributes are the original's but for some tensors."""

    def __init__(self, original: Any, attributes: dict[str, Any]) -> None:
        self.__dict__["_original"] = original
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._original).__call__(self, *args, **kwargs)
