"""The line of the user's code that a call comes from."""

from __future__ import annotations

import inspect
from types import FrameType

_FRAMEWORKS = ("lightning_sp.", "torch.", "lightning.")


def users_line() -> str:
    """Return the file and line outside of torch and of this package that called, with its text."""
    frame = _users_frame()
    if frame is None:
        return "a line that is not known"
    found = inspect.getframeinfo(frame)
    text = (found.code_context or [""])[0].strip()
    return f"{found.filename}:{found.lineno}: {text}"


def users_place() -> str:
    """Return the file and line alone: to read a line's text takes milliseconds."""
    frame = _users_frame()
    return "a line that is not known" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _users_frame() -> FrameType | None:
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(_FRAMEWORKS) and name not in ("lightning_sp", "torch"):
            return frame
        frame = frame.f_back
    return None


def is_within(module: str) -> bool:
    """Return whether a function of a module of Python's, or of one below it, is being called."""
    frame = inspect.currentframe()
    while frame is not None:
        if f"{frame.f_globals.get('__name__', '')}.".startswith(f"{module}."):
            return True
        frame = frame.f_back
    return False
