"""What a rank says of an error of its own: the class, one line of its text and the user's line. Pure functions."""

from __future__ import annotations

import re

from lightning_sp.comm.hangs.main_thread import Place, told_line
from lightning_sp.errors import text_of

_MOST_LETTERS = 1000
# torch raises what a loader's worker has raised with that process' whole traceback as text.
_OF_WORKER = " in DataLoader worker process "
_LINE = re.compile(r'  File "(.*)", line (\d+), in (.*)')


def raised(error: BaseException, place: Place) -> str:
    """Return what a rank says of an error of its own."""
    words = _one_line(text_of(error).strip())
    if (
        len(words) > _MOST_LETTERS
    ):  # of a tensor that it shows, say: it travels through the store, and is shown by every rank
        words = f"{words[:_MOST_LETTERS]}... ({len(words) - _MOST_LETTERS} letters more in that rank's own traceback)"
    return f"has raised {type(error).__name__}{f': {words}' if words else ''}, in {place.line or place.stack[-1]}"


def _one_line(text: str) -> str:
    """Return the first line, and of an error of a loader's worker where it was raised there, and what it says itself."""
    first, *rest = text.split("\n")
    lines = [(number, found) for number, line in enumerate(rest) if (found := _LINE.fullmatch(line))]
    if _OF_WORKER not in first:
        return first
    if not lines:  # what a worker could not send, which has no line
        return " ".join([first, *rest[:1]])
    number, (file, at, function) = lines[-1][0], lines[-1][1].groups()
    said = next((line for line in rest[number:] if line and not line.startswith(" ")), "")
    return f"{first} {said} ({told_line((file, int(at), function))})"
