"""Which tensors that a step returns or keeps have a rank's tokens: known by their shapes at two lengths, and not by their numbers.

                a whole crop       a rank's part      so it is
    logits      (2, 64, V)         (2, 16, V)         of tokens: made whole
    features    (2, 16)            (2, 16)            whole

Ranks may have either alike: hours of the day repeat, flags are all 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

Path = tuple[object, ...]
Shapes = Mapping[Path, tuple[int, ...]]


class TokenOutputs:
    """What trials, and ranks that differ, have shown of a model's outputs; a class because later steps ask."""

    def __init__(self) -> None:
        self._found: defaultdict[tuple[str, Path], set[bool]] = defaultdict(set)

    def compare(self, of: str, whole: Shapes, part: Shapes, lengths: Collection[tuple[int, int]]) -> None:
        """Learn from one step at two lengths.

        Args:
            of: whose tensors these are, in words: "predict_step returns".
            whole: the shapes that it gives of a whole batch; of more rows, perhaps.
            part: likewise, of a rank's part.
            lengths: tokens of a rank's part of each sequence, and of the whole sequence.
        """
        told_apart = {pair for pair in lengths if pair[0] != pair[1]}
        parts = {length for length, _ in lengths} - {length for length, _ in told_apart}
        for path in whole.keys() & part.keys():
            own, of_whole = part[path], whole[path]
            if len(own) < 2 or len(own) != len(of_whole) or own[2:] != of_whole[2:]:
                continue
            if (own[1], of_whole[1]) in told_apart:
                self.note(of, path, of_tokens=True)
            elif own[1] == of_whole[1] and own[1] not in parts:
                self.note(of, path, of_tokens=False)

    def note(self, of: str, path: Path, *, of_tokens: bool) -> None:
        """Remember what one tensor is, and with it those in other places of the same list or dict."""
        for each in _patterns(path):
            self._found[of, each].add(of_tokens)

    def are_of_tokens(self, of: str, path: Path) -> bool | None:
        """Return whether a tensor of (rows, as many as a rank has tokens, ...) has tokens; None where that is not known."""
        for each in _patterns(path):
            found = self._found.get((of, each))
            if found is not None:
                return next(iter(found)) if len(found) == 1 else None
        return None


def _patterns(path: Path) -> Iterator[Path]:
    """Yield the way to a tensor, then ways to its like: with any number in a list, from the outside on, then behind any key of a dict."""
    path = tuple(part for key in path for part in (key if isinstance(key, tuple) else (key,)))
    yield path
    places = [index for index, key in enumerate(path) if isinstance(key, int)]
    for last in places:
        yield tuple("*" if index in places and index <= last else key for index, key in enumerate(path))
    if len(path) > 1:
        yield (path[0], "any key", *path[2:])
        yield (path[0], "any key", *("*" if isinstance(key, int) else key for key in path[2:]))
