"""Functions of Python, `math` and NumPy that know tracked numbers, by whichever name a file of the user's has them.

    from math import exp;  exp(loss.item()) < 20
    import math as m;      m.isclose(count.item(), 32)
    int((x > 50).sum()) > 20                              Python's own `int` makes a plain number of whatever it is given

What C makes of such a number elsewhere keeps no trace of it: a text, a tensor, `bisect`.
"""

from __future__ import annotations

import builtins
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_sp.preflight.recording.numbers_read.tracked_numbers import Float, Integer, farther, tracked
from lightning_sp.preflight.recording.users_lines import only_calls
from lightning_sp.users_code.ownership import is_class_of_user, is_file_of_user

# Functions of NumPy, and of `math`, that take a list of numbers.
_OF_LISTS = (
    *("array", "asarray", "mean", "average", "median", "min", "max", "amin", "amax", "sum", "std", "quantile", "percentile"),
)  # fmt: skip
_OF_LISTS_IN_MATH = ("fsum", "prod")
_LONGEST = 4096
# Those that take one number, or two.
_OF_NUMBERS = ("sqrt", "exp", "log", "log2", "log10", "log1p", "expm1", "tanh")
_OF_NUMBERS_IN_MATH = ("pow", "fmod", "hypot", "isclose", "erf", "atan", "sin", "cos", "copysign", "ldexp", "exp2")
# Of Python's own, that make a plain number of one.
_PLAIN = ("int", "float", "len")
# Gives what a function of Python's makes of a tensor, tracked where it is to be.
Reads = Callable[[Callable[..., Any], Tensor], Any]


@contextmanager
def told_to_libraries(module: nn.Module, reads: Reads | None = None) -> Iterator[None]:
    """Within, have functions know tracked numbers: of one they give one, of a list what others would give.

    Args:
        module: whose code runs, of files that may be no modules of Python's: a program that a launcher runs once more.
        reads: of a tensor; None as Python does.
    """
    functions: list[tuple[ModuleType, str, Any]] = [(np, name, _of_list) for name in _OF_LISTS]
    functions += [(math, name, _of_list) for name in _OF_LISTS_IN_MATH]
    functions += [(library, name, _of_number) for library in (math, np) for name in _OF_NUMBERS]
    functions += [(math, name, _of_number) for name in _OF_NUMBERS_IN_MATH if hasattr(math, name)]
    known = {}
    for library, name, shown in functions:
        own = getattr(library, name)
        known[id(own)] = shown(own)
    plain = {name: _plain(getattr(builtins, name), reads) for name in _PLAIN}
    with ExitStack() as undo:
        for names, file in [*_files_of_user(module), (vars(math), ""), (vars(np), "")]:
            for name in [name for name, value in names.items() if id(value) in known]:
                _show(undo, names, name, known[id(names[name])])
            for name, value in plain.items():
                if file and name not in names and only_calls(file, name):
                    _show(undo, names, name, value)
        yield


def _files_of_user(root: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return the names of each file of the user's, and where it is."""
    kinds = {kind: None for each in root.modules() for kind in type(each).__mro__ if is_class_of_user(kind)}
    functions = (each for kind in kinds for each in vars(kind).values() if isinstance(each, FunctionType))
    files = (each for name, each in list(sys.modules.items()) if is_file_of_user(name))
    of_modules = (vars(each) for each in files if isinstance(each, ModuleType))
    found = {id(names): names for names in (*of_modules, *(each.__globals__ for each in functions))}
    return [(names, file) for names in found.values() if isinstance(file := names.get("__file__"), str)]


def _show(undo: ExitStack, names: dict[str, Any], name: str, value: Any) -> None:
    """Give a name another value, and put back its own."""
    undo.callback(*((names.__setitem__, name, names[name]) if name in names else (names.pop, name, None)))
    names[name] = value


def _of_number(own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with np.errstate(all="ignore"):
                output = own(*args, **kwargs)
        except OverflowError:  # of a large one
            output = math.inf
        number = next((each for each in args if isinstance(each, (Integer, Float))), None)
        if number is None:
            return output
        if isinstance(output, bool):
            return number.budget.decided("eq", args[1], output)
        return tracked(output, number.budget)

    return call


def _of_list(own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], (list, tuple, deque)) and len(args[0]) <= _LONGEST:
            args = ([farther(each) for each in args[0]], *args[1:])
        return own(*args, **kwargs)

    return call


class _Kind(type):
    """What stands in the place of a class of Python's: `isinstance` goes by that."""

    own: type

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.own)


def _plain(own: Any, reads: Reads | None) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        number = args[0] if len(args) == 1 and not kwargs else None
        if reads is not None and isinstance(number, Tensor):
            return reads(own, number)
        if isinstance(number, (Integer, Float)):
            # An integer of a fraction is far from it, as what is rounded is.
            is_own = own is float or isinstance(number, Integer)
            return tracked(own(number.plain.__add__(number, 0) if is_own else number), number.budget)
        return own(*args, **kwargs)

    if not isinstance(own, type):
        return wraps(own)(make)
    return _Kind(own.__name__, (), {"own": own, "__new__": lambda _, *args, **kwargs: make(*args, **kwargs)})
