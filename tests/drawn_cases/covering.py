"""Few rows of a large product in which any two values that can meet do meet: pairwise testing.

Most faults need one value, or two that meet; a whole product asks the same question many times. `make test` runs the
covering rows, `make test-all` the product.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence

Pair = tuple[tuple[str, Hashable], ...]


def covering(rows: Sequence[Mapping[str, Hashable]], num_axes: int = 2) -> list[int]:
    """Return the numbers of rows, in their order, that have every pair of two axes' values that any row has.

    The same rows give the same answer: the row with the most new pairs is next, the first of equals.

    Args:
        rows: axis -> value; what an axis has no value for leaves the axis out.
        num_axes: 1 for rows that have every value instead.
    """
    pairs = [_pairs(row, num_axes) for row in rows]
    missing = set().union(*pairs)
    chosen: list[int] = []
    while missing:
        best = max(range(len(rows)), key=lambda i: len(pairs[i] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return sorted(chosen)


def _pairs(row: Mapping[str, Hashable], num_axes: int) -> set[Pair]:
    return set(itertools.combinations(sorted(row.items(), key=lambda item: item[0]), num_axes))
