"""What transformers calls a mask function, whoever made it: a graph of torch.compile makes it anew, before Python 3.11 without its full name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any


def mask_name(function: Any) -> str:
    """Return the qualified name of a mask function, as where transformers defines it."""
    name: str = getattr(function, "__qualname__", repr(function))
    code = getattr(function, "__code__", None)
    return name if code is None else _names().get(code, name)


@cache
def _names() -> dict[CodeType, str]:
    from transformers import masking_utils  # noqa: PLC0415

    functions = [value for value in vars(masking_utils).values() if isinstance(value, FunctionType)]
    return dict(pair for each in functions for pair in _within(each.__code__, each.__qualname__))


def _within(code: CodeType, name: str) -> Iterator[tuple[CodeType, str]]:
    yield code, name
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _within(constant, f"{name}.<locals>.{constant.co_name}")
