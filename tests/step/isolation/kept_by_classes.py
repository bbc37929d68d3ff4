"""A file of a user's, imported by name and as a whole: what its classes and itself keep."""

from __future__ import annotations

from typing import ClassVar

COUNT = 0


class Single:
    """The one of its kind, made when it is asked for."""

    one: ClassVar[Single | None] = None

    def __init__(self) -> None:
        self.rows: list[int] = []

    @classmethod
    def of(cls) -> Single:
        if cls.one is None:
            cls.one = cls()
        return cls.one

    def add(self) -> int:
        self.rows.append(1)
        return len(self.rows)


class Named:
    rows: ClassVar[list[int]] = []


def counted() -> int:
    global COUNT
    COUNT += 1
    return COUNT
