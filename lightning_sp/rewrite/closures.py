"""What a user's score or mask function holds: its tensors, and the function again with others in their place.

Looked into: the variables of enclosing functions, defaults, globals that are tensors or functions, partials, what a bound method or a module
in such a variable is asked for by name, and the elements of tuples, lists and dicts.
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
    """Return the tensors that a function holds, by where it has them from."""
    return dict(_walk(value, name or getattr(value, "__qualname__", type(value).__name__), (), set()))


def check_whole_tensors(context: SequenceContext, function: Callable[..., Any], what: str) -> None:
    """Refuse a function of positions that reads tensors of this rank's tokens: it is asked for global positions.

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


def of_real_tokens(function: Callable[..., Tensor], queries: SequenceInfo, keys: SequenceInfo) -> Callable[..., Tensor]:
    """Return a user's function of (..., query, key) that is asked for no position of our padding, of which its tensors may hold nothing.

    There it is told the last token's: no token sees padding, and what a query of it sees is thrown away.
    """
    if all(each.padded_length == each.length for each in (queries, keys)):
        return function
    last, last_key = queries.length - 1, keys.length - 1

    def asked(*places: Tensor) -> Tensor:
        *others, query, key = places
        return function(*others, query.clamp(max=last), key.clamp(max=last_key))

    return asked


def learned_score_mod(
    function: Callable[..., Tensor], like: Tensor, sequences: tuple[SequenceInfo, SequenceInfo] | None = None
) -> ScoreMod:
    """Return a user's score function with the tensors that it learns by as its arguments, so that they get their gradients.

    Args:
        function: (score, row, head, query, key) -> score; what it holds that requires a gradient is found.
        like: queries, for device and dtype.
        sequences: those of queries and keys in the step in progress, None outside of one.

    Raises:
        SequenceParallelError: it learns by something that is not found.
    """
    learned = list({id(t): t for t in closure_tensors(function).values() if t.requires_grad}.values())
    places = [id(tensor) for tensor in learned]

    def with_tensors(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor, *held: Tensor) -> Tensor:
        rebuilt = rebuild(function, dict(zip(places, held, strict=True)))
        rebuilt = rebuilt if sequences is None else of_real_tokens(rebuilt, *sequences)
        changed: Tensor = rebuilt(score, row, head, query, key)
        return changed

    made = ScoreMod(with_tensors, *learned)
    zero = torch.arange(1, device=like.device)
    with torch.enable_grad():
        tried = made.apply(
            like.new_zeros(1, 1, 1, 1), ScorePositions((0, 1), (0, 1), zero, zero), tuple(t.detach() for t in learned)
        )
    if tried.requires_grad:
        raise SequenceParallelError(
            f"score function {getattr(function, '__qualname__', function)} learns by a tensor that is none of those found in it, "
            f"{[tuple(t.shape) for t in learned]}: its gradient would be lost; let the function read it as a variable of the enclosing function"
        )
    return made


def rebuild(value: Any, others: dict[int, Tensor]) -> Any:
    """Return a function that holds other tensors, by the ids of those that it holds; the rest is shared."""
    return _rebuilt(value, others, (), {}) if others else value


def _walk(value: Any, path: str, names: tuple[str, ...], seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for name, part, asked in _parts(value, names):
        yield from _walk(part, f"{path}.{name}", asked, seen)


def _parts(value: Any, names: tuple[str, ...]) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yield the (name, value, names asked of it) of what a value holds."""
    if isinstance(value, types.FunctionType):
        asked = value.__code__.co_names
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if _filled(cell):
                yield name, cell.cell_contents, asked
        yield from ((f"default {i}", part, asked) for i, part in enumerate(value.__defaults__ or ()))
        yield from ((name, part, asked) for name, part in (value.__kwdefaults__ or {}).items())
        for name in asked:
            if isinstance(held := value.__globals__.get(name), (Tensor, types.FunctionType)):
                yield name, held, asked
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
        asked = (*names, *(call.__code__.co_names if isinstance(call, types.FunctionType) else ()))
        for name in asked:
            held = _attribute(value, name)
            if isinstance(held, (Tensor, torch.nn.Module, list, tuple, dict)):
                yield name, held, asked


def _attribute(value: Any, name: str) -> Any:
    """Return what a value holds by a name, methods and properties apart, which would run."""
    own = vars(value) if hasattr(value, "__dict__") else {}
    for held in (own, *(own.get(kind) or {} for kind in ("_parameters", "_buffers", "_modules"))):
        if isinstance(held, dict) and name in held:
            return held[name]
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
        asked = value.__func__.__code__.co_names
        return types.MethodType(
            _rebuilt(value.__func__, others, (), made), _rebuilt(value.__self__, others, asked, made)
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
    held = {name: _rebuilt(part, others, asked, made) for name, part, asked in _parts(value, names)}
    return _StandIn(value, held)


def _rebuilt_function(function: types.FunctionType, others: dict[int, Tensor], made: dict[int, Any]) -> Any:
    asked = function.__code__.co_names
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    own_globals = dict(function.__globals__)
    again = types.FunctionType(function.__code__, own_globals, function.__name__, None, cells or None)
    made[id(function)] = again  # before its parts: a function may hold itself
    for cell, old in zip(cells, function.__closure__ or (), strict=True):
        if _filled(old):
            cell.cell_contents = _rebuilt(old.cell_contents, others, asked, made)
    again.__defaults__ = _rebuilt(function.__defaults__, others, asked, made)
    again.__kwdefaults__ = _rebuilt(function.__kwdefaults__, others, asked, made)
    for name in asked:
        if isinstance(held := own_globals.get(name), (Tensor, types.FunctionType)):
            own_globals[name] = _rebuilt(held, others, asked, made)
    return again


class _StandIn:
    """A module or object with other tensors; a class because attributes are asked of it."""

    def __init__(self, original: Any, held: dict[str, Any]) -> None:
        self.__dict__["_original"] = original
        self.__dict__.update(held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._original).__call__(self, *args, **kwargs)
