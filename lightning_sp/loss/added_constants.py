"""What a step adds to the counts that it divides its loss by, `mask.sum() + 1`: one device adds it once, and groups once each.

    one device       N / D             D   = sum over groups of (D_g - e) + e
    each group       N_g / D_g         e   = (sum of D_g - D) / (groups - 1)

A trial has both, D and all D_g. A term is known by its way through the graph: (AddBackward0, DivBackward0) say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_sp.loss.own_terms import OwnTerm

Path = tuple[str, ...]
# Of a term in a trial: its way, and what it is divided by.
Described = tuple[Path, tuple[float, ...]]
# Of each term of a way, in order: which divisor has something added, and how much; 0 of none.
Added = Mapping[Path, Sequence[tuple[int, float]]]
_ROUNDING = 1e-6  # of float32 weights added up; less is no matter


def described(terms: Sequence[OwnTerm]) -> list[Described]:
    """Return what a trial tells of a loss's terms; it waits for a device."""
    return [(each.path, tuple(float(divisor) for divisor in each.divisors)) for each in terms]


def added_constants(groups: Sequence[Sequence[Described]], whole: Sequence[Described]) -> Added | None:
    """Return what is added to the divisors of a loss's terms; None where nothing is, or that cannot be told. Pure.

    Args:
        groups: of each data-parallel group.
        whole: of one device on the rows of all.
    """
    if any([path for path, _ in each] != [path for path, _ in groups[0]] for each in groups):
        return None
    found: dict[Path, list[tuple[int, float]]] = {}
    for path in {path for path, _ in groups[0]}:
        of_groups = [[numbers for name, numbers in each if name == path] for each in groups]
        of_whole = [numbers for name, numbers in whole if name == path]
        if len(of_whole) == len(of_groups[0]):
            found[path] = [_of_term(each, of_all) for *each, of_all in zip(*of_groups, of_whole, strict=True)]
    return found if any(constant for terms in found.values() for _, constant in terms) else None


def counts_with_constants(terms: Sequence[Described], added: Added) -> list[float]:
    """Return the divisors to which something is added. Pure."""
    found, places = [], dict[Path, int]()
    for path, divisors in terms:
        index, constant = _known(added, places, path)
        if constant and index < len(divisors):
            found.append(divisors[index])
    return found


def added_to(terms: Sequence[OwnTerm], added: Added | None, like: Tensor) -> Tensor:
    """Return of each term how much of what it counts by is added, 0 where that is not known. Shapes: -> (terms,), float64."""
    found, places = [], dict[Path, int]()
    for term in terms:
        index, constant = _known(added or {}, places, term.path)
        if not constant or index >= len(term.divisors):
            found.append(torch.zeros((), dtype=torch.float64, device=like.device))
            continue
        divisor = torch.as_tensor(term.divisors[index], dtype=torch.float64, device=like.device).reshape(())
        part = term.count(like) * constant / divisor
        found.append(torch.where(torch.isfinite(part), part, torch.zeros_like(part)))
    return torch.stack(found)


def _known(added: Added, places: dict[Path, int], path: Path) -> tuple[int, float]:
    """Return what is known of the next term of a way."""
    known, place = added.get(path, ()), places.get(path, 0)
    places[path] = place + 1
    return known[place] if place < len(known) else (0, 0.0)


def _of_term(groups: Sequence[Sequence[float]], whole: Sequence[float]) -> tuple[int, float]:
    """Return which divisor differs between groups and one device, if one alone does, and what is added to it."""
    if any(len(each) != len(whole) for each in groups):
        return 0, 0.0
    other = [
        i
        for i, number in enumerate(whole)
        if any(not math.isclose(each[i], number, rel_tol=_ROUNDING) for each in groups)
    ]
    if len(other) != 1:
        return 0, 0.0
    [i] = other
    constant = (sum(each[i] for each in groups) - whole[i]) / (len(groups) - 1)
    return i, constant if math.isfinite(constant) and abs(constant) > _ROUNDING * abs(whole[i]) else 0.0
