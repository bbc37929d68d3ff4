"""Which lines compare or read numbers of a rank's part of a batch, by what a whole run and one on a part have noted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from typing import NamedTuple

import torch

from lightning_sp.preflight.recording.compared import Entry
from lightning_sp.preflight.recording.hidden_terms import Call
from lightning_sp.preflight.recording.numbers_read.read_numbers import ARRAYS, READS, TRUTHS, ReadNumbers
from lightning_sp.preflight.recording.users_lines import INSTALLED, ends_a_loop


class Line(NamedTuple):
    """A line of the user's, and a function of torch that it compares or reads numbers by.

    Args:
        counted: whether it reads a size that values have decided.
        of_tokens: whether it gives Python or NumPy numbers of each token.
        of_layer: whether it is a layer's, of what that was given.
    """

    file: str
    line: int
    function: str
    counted: bool
    of_tokens: bool
    of_layer: bool = False

    @property
    def is_installed(self) -> bool:
        """Whether it is a library's."""
        return any(folder in self.file for folder in INSTALLED)

    @property
    def may_fail(self) -> bool:
        """Whether nothing is known of a step that fails by it: a library checks, or a layer has parts of that size."""
        return self.is_installed or self.of_layer

    @property
    def is_hidden(self) -> bool:
        """Whether a layer makes something of its tokens' numbers in Python or NumPy, of which nobody sees whether it is each token's own."""
        return self.of_layer and self.of_tokens

    @property
    def is_read(self) -> bool:
        """Whether a step has a number of Python's own by it, of which nobody sees what C makes. A layer's may be a size of its tokens."""
        return self.function in READS and not (self.of_tokens or self.of_layer or self.is_installed)

    def describe(self) -> str:
        """Return it in words."""
        return Call(*self[:3], 0).describe()


def numbers_of_parts(whole: ReadNumbers, sharded: ReadNumbers, groups: int) -> dict[Line, int]:
    """Return the lines that compare or read numbers of this rank's tokens, and how often. Pure.

    Numbers of each token are none of these: a part has fewer, and each is what it is. But where a user's line hands them to Python or NumPy,
    nobody sees what is made of them.

    Args:
        whole: what one device's run has noted.
        sharded: what the run on a part has noted.
        groups: data-parallel groups whose rows the whole has.
    """
    split = _other_entries(whole, sharded, {1, groups})
    found: Counter[Line] = Counter()
    for call, read in sharded.calls.items():
        before = whole.calls.get(call)
        alike = read.numbers == 1 or (before is not None and before.numbers in (read.numbers, groups * read.numbers))
        line = Line(*call[:3], read.counted, not alike, read.of_layer)
        handed_over = call.function in ARRAYS and not line.is_installed
        if (alike or handed_over) and read.leaves & split:
            found[line] += 1
    return dict(found)


def cuts_of_parts(whole: ReadNumbers, sharded: ReadNumbers) -> list[str]:
    """Return the lines of the user's that cut tokens by a number that is beyond a part, or is zero. Pure.

    Args:
        whole: what one device's run has noted.
        sharded: what the run on a part has noted.
    """
    return [f"{file}:{line}" for file, line in _cuts(sharded, {part for part, _ in _cut_lengths(whole, sharded)})]


def has_other_cuts(whole: ReadNumbers, sharded: ReadNumbers, forced: ReadNumbers) -> bool:
    """Return whether a whole run with numbers forced cuts tokens at lines of the user's where one without does not. Pure.

    `if len(mine) > capacity: mine = mine[:capacity]` changes nothing of a crop whose experts have few tokens.
    """
    lengths = {of_whole for _, of_whole in _cut_lengths(whole, sharded)}
    return not _cuts(forced, lengths) <= _cuts(whole, lengths)


def _cut_lengths(whole: ReadNumbers, sharded: ReadNumbers) -> Iterator[tuple[int, int]]:
    """Yield the lengths of the batch's dims of which a rank has a part: that of the part, and of the whole."""
    for entry, shape in sharded.sizes.items():
        pairs = zip(shape, whole.sizes.get(entry, shape), strict=False)
        yield from ((part, of_whole) for part, of_whole in pairs if part != of_whole)


def _cuts(read: ReadNumbers, lengths: Set[int]) -> Set[tuple[str, int]]:
    """Return the lines of the user's that cut dims of these lengths, or chosen tokens, by a number that is beyond them, or is zero."""
    return {
        (file, line): None
        for (file, line), sizes in read.cuts.items()
        if ((file, line) in read.counted_cuts or not lengths.isdisjoint(sizes))
        and not any(folder in file for folder in INSTALLED)
    }.keys()


def loops_of_parts(whole: ReadNumbers, sharded: ReadNumbers) -> list[str]:
    """Return the lines of the user's by which this rank's tokens end a loop, as `cuts_of_parts`. Pure."""
    split, reads = _other_entries(whole, sharded, {1}), TRUTHS | {"item"}
    places = {call[:2] for call, read in sharded.calls.items() if call.function in reads and read.leaves & split}
    return sorted(f"{file}:{line}" for file, line in places if ends_a_loop(file, line))


def numbers_of_groups(whole: ReadNumbers, sharded: ReadNumbers) -> dict[Line, int]:
    """Return the lines that compare or read numbers of a data-parallel group's rows, and how often. Pure.

    Args:
        whole: what one device's run on the rows of all groups has noted.
        sharded: what the run on this group's has noted.
    """
    split = _other_entries(whole, sharded, {1})
    of_all, own = (Counter(call[:3] for call in each.calls) for each in (whole, sharded))
    found: Counter[Line] = Counter()
    for call, read in sharded.calls.items():
        before = whole.calls.get(call)
        line = Line(*call[:3], read.counted, of_tokens=False, of_layer=read.of_layer)
        # Numbers of each row are none of these, either: in one tensor, or by a library's loop over rows (Qwen-VL's positions).
        is_of_rows = line.is_installed and of_all[call[:3]] > own[call[:3]]
        if before is not None and before.numbers == read.numbers and read.leaves & split and not is_of_rows:
            found[line] += 1
    return dict(found)


def _other_entries(whole: ReadNumbers, sharded: ReadNumbers, times: set[int]) -> set[Entry]:
    """Return the tensors of the batch that have none of these times fewer numbers than whole ones; positions, say, only parts may have."""
    return {
        entry
        for entry, part in sharded.sizes.items()
        if entry in whole.sizes and _numel(whole.sizes[entry]) not in [n * _numel(part) for n in times]
    }


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
