"""The line of the user's code that a call comes from."""

from __future__ import annotations

import inspect


def users_line() -> str:
    """Return the file and line outside of torch and of this package that called, with its text."""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("lightning_sp.", "torch.", "lightning.")) and name not in ("lightning_sp", "torch"):
            found = inspect.getframeinfo(frame)
            text = (found.code_context or [""])[0].strip()
            return f"{found.filename}:{found.lineno}: {text}"
        frame = frame.f_back
    return "a line that is not known"
