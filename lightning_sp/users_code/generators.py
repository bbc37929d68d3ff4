"""Generators that a user's code keeps: what a trial takes from one is there again behind it.

kept._ahead     a b c       taken by a trial, given again behind it
in a trial          ^       its own place
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any


class KeptGenerator(Generator[Any, Any, Any]):
    """A generator of the user's: it gives again what trials have taken, then goes on."""

    def __init__(self, source: Generator[Any, Any, Any]) -> None:
        self._source = source
        self._ahead: deque[Any] = deque()

    def send(self, value: Any) -> Any:
        """Return the next one, as the generator itself does."""
        if not self._ahead:
            return self._source.send(value)
        if value is not None:  # a trial asked for more, and sent nothing
            raise _refusal("send")
        return self._ahead.popleft()

    def throw(self, *error: Any) -> Any:
        """Raise an error within the generator."""
        if self._ahead:
            raise _refusal("throw")
        return self._source.throw(*error)

    def close(self) -> None:
        """End it."""
        self._ahead.clear()
        self._source.close()

    def at(self, place: int) -> Any:
        """Return what is `place` further on, without taking it."""
        while len(self._ahead) <= place:
            self._ahead.append(self._source.send(None))
        return self._ahead[place]


class TriedGenerator(Generator[Any, Any, Any]):
    """A kept generator in a trial, from which the trial takes nothing for good."""

    def __init__(self, kept: KeptGenerator, place: int = 0) -> None:
        self._kept, self._place, self._is_closed = kept, place, False

    def copy(self) -> TriedGenerator:
        """Return another one that goes on from here."""
        return TriedGenerator(self._kept, self._place)

    def send(self, value: Any) -> Any:
        """Return the next one.

        Raises:
            RuntimeError: where something is sent. It ends the trial, whose refusal has its text.
        """
        if value is not None:
            raise _refusal("send")
        if self._is_closed:
            raise StopIteration
        found = self._kept.at(self._place)
        self._place += 1
        return found

    def throw(self, *_: Any) -> Any:
        """Refuse an error within the generator."""
        raise _refusal("throw")

    def close(self) -> None:
        """End it for the trial alone."""
        self._is_closed = True


def _refusal(name: str) -> RuntimeError:
    return RuntimeError(
        f"the step calls {name}() of a generator that is kept between steps, and what that does to a generator cannot be put back behind a "
        "trial: keep what it adds up in an object with attributes"
    )
