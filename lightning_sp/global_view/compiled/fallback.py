"""What torch.compile fails at: the function runs as without a compiler, those that it calls are compiled, and one line says which and why.

Dynamo fails before it runs anything of a function, so nothing is done twice.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Where Dynamo writes what it leaves, with the error; there is no other place that has both (2.13).
_LOGGER = "torch._dynamo.convert_frame"
# Where it writes a guard's error, before that.
_LOGGER_OF_GUARDS = "torch._guards"
_LEFT = re.compile(r"WON'T CONVERT (?P<name>\S+) (?P<file>.+) line (?P<line>\d+)")
# What Dynamo calls the rest of a function behind a break.
_REST = re.compile(r"torch_dynamo_resume_in_(?P<name>.+)_at_(?P<line>\d+)")


class _Failures(logging.Filter):
    """Takes Dynamo's pages on what it leaves, and gives one line in their place. A class because logging asks for one."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Callable[[str], None]] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is written as it is."""
        if not self.running:
            return True
        if record.name == _LOGGER_OF_GUARDS:
            return False
        found = _LEFT.search(record.getMessage())
        error = record.exc_info[1] if record.exc_info else None
        if error is None or found is None:
            return True
        rest = _REST.fullmatch(found["name"])
        name, line = (rest["name"], rest["line"]) if rest else (found["name"], found["line"])
        self.running[-1](f"torch.compile cannot take {name} ({found['file']}:{line}): {reason_of(error)}")
        return False


_FAILURES = _Failures()


def reason_of(error: BaseException) -> str:
    """Return an error's name and first line; of what stands around another, that of the other."""
    cause = error
    while (inner := getattr(cause, "inner_exception", None) or cause.__cause__) is not None:
        cause = inner
    lines = str(cause).splitlines()
    return f"{type(cause).__name__}: {lines[0] if lines else ''}"


@contextmanager
def running_what_fails(note: Callable[[str], None]) -> Iterator[None]:
    """Let functions that torch.compile fails at run as they are, while this is entered.

    Args:
        note: is called with a line for each.
    """
    config: Any = _config()
    before = config.suppress_errors
    config.suppress_errors = True
    _FAILURES.running.append(note)
    try:
        yield
    finally:
        _FAILURES.running.pop()
        config.suppress_errors = before


def _config() -> Any:
    # Not before the first compiled call: it takes seconds.
    from torch._dynamo import config  # noqa: PLC0415

    for name in (_LOGGER, _LOGGER_OF_GUARDS):
        logging.getLogger(name).addFilter(_FAILURES)  # once, however often
    return config
