"""In which view the steps of a run are: each kind for itself, for what one refuses another may carry."""

from __future__ import annotations


class Views:
    """Steps of training, and of each evaluation; a class because what is refused changes them.

    Args:
        whole: all see whole sequences, by `global_view=True`.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self.whole = whole
        self._refusals: dict[str, str] = {}
        self._given_up: set[str] = set()
        self._ended: set[str] = set()
        self._for_numbers: set[str] = set()

    def sees_whole(self, kind: str) -> bool:
        """Return whether a kind of step is in the global view; the kind is the evaluation's name, empty in training."""
        return self.whole or kind in self._refusals

    def refusal(self, kind: str) -> str:
        """Return why a kind of step is in the global view, empty where it is not."""
        return self._refusals.get(kind, "")

    def may_try(self, kind: str) -> bool:
        """Return whether a kind of step may be tried in the global view: once."""
        return not self.sees_whole(kind) and kind not in self._given_up

    def use_whole(self, kind: str, refusal: Exception) -> None:
        """Have a kind of step in the global view, for what its part has refused."""
        self._refusals[kind] = str(refusal)
        if getattr(refusal, "ends_steps", False):
            self._ended.add(kind)
        if getattr(refusal, "of_numbers", False):
            self._for_numbers.add(kind)

    def part_ends(self, kind: str) -> bool:
        """Return whether its part was refused by the step itself, which would have ended any before."""
        return kind in self._ended

    def is_for_numbers(self, kind: str) -> bool:
        """Return whether its part was refused for what it logs alone."""
        return kind in self._for_numbers

    def give_up(self, kind: str) -> None:
        """Have a kind of step see its part again: the global view refuses it, too."""
        del self._refusals[kind]
        self._ended.discard(kind)
        self._for_numbers.discard(kind)
        self._given_up.add(kind)
