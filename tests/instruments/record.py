"""Numbers that a test keeps of a step, in which a preflight sees nothing that counts.

A list of a module's that grows may decide about later steps: a trial shows it at later lengths, for a third of a fit's time.
"""

from __future__ import annotations

from array import array
from typing import Any


class Record(array):
    """Floating numbers to append to; compared and sent to other processes as a list."""

    __slots__ = ()

    def __new__(cls, numbers: Any = ()) -> Record:
        return super().__new__(cls, "d", numbers)

    def __eq__(self, other: object) -> bool:
        return self.tolist() == list(other) if isinstance(other, (list, array)) else NotImplemented

    __hash__ = None

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        return Record(found) if isinstance(place, slice) else found

    def __add__(self, other: Any) -> list[float]:
        return [*self, *other]

    def __radd__(self, other: Any) -> list[float]:
        return [*other, *self]

    def clear(self) -> None:
        del self[:]

    def __deepcopy__(self, memo: Any) -> Record:
        return Record(self)

    def __repr__(self) -> str:
        return repr(self.tolist())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (self.tolist(),)
