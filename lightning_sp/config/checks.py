"""Checks of one option's value, with an error that says what was given and what it may be."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from lightning_sp.errors import SequenceParallelError, closest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# A number of ranks or tokens, or the choice left to the strategy.
Size = int | Literal["auto"]
_YEAR_S = 366 * 24 * 3600


def check_switches(options: DataclassInstance) -> None:
    """Refuse a switch that is no bool."""
    # A string is true whatever it says: "false" would switch an option on.
    for option in fields(options):
        given = getattr(options, option.name)
        if option.type == "bool" and not isinstance(given, bool):
            raise SequenceParallelError(f"{option.name}={given!r}: must be True or False")
        if option.type == "bool | None" and given is not None and not isinstance(given, bool):
            raise SequenceParallelError(f"{option.name}={given!r}: must be True, False or None")


def check_name(option: str, given: Any, known: tuple[str, ...]) -> None:
    """Refuse a name that is not known."""
    if given not in known:
        meant = closest(given, known) if isinstance(given, str) else ""
        raise SequenceParallelError(f"{option}={given!r}: must be one of {', '.join(known)}{meant}")


def check_seconds(option: str, given: float) -> None:
    """Refuse a time that is not positive, or longer than any run: torch's limits cannot hold all of them."""
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if not is_number or not 0 < given <= _YEAR_S:
        raise SequenceParallelError(f"{option}={given!r}: must be positive, in seconds, and a year at most ({_YEAR_S})")


def check_count(option: str, given: Any) -> None:
    """Refuse what is no positive integer."""
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise SequenceParallelError(f"{option}={given!r}: must be a positive integer")


def check_size(option: str, given: Any) -> None:
    """Refuse what is neither a positive integer nor "auto"."""
    if given != "auto" and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise SequenceParallelError(f"{option}={given!r}: must be a positive integer or 'auto'")
