"""The numbers that a step shows, on the ranks and on one device.

    |shown - wanted| <= max(1e-5 max(|shown|, |wanted|), 16 m)        in 16 bits: 8e-2 max(|shown|, |wanted|, 1)

`shown` is what the ranks log, reduced as Lightning reduces it; `wanted` is that of whole sequences, each data-parallel group's counted once;
m is how far that moves where weights do by a rounding (`rounded_numbers.py`), 0 where that was not asked.
A number that decides about the run, a monitored one, is refused where it differs; any other is named in a warning. What differs between two
whole runs, a time, is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch

from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.explain.verdict import TOLERANCES
from lightning_sp.preflight.recording.attributes import ATTRIBUTE
from lightning_sp.preflight.recording.logged import WEIGHT, Number

# Of one number a step's rounding in float32 makes some 1e-7; parts of models compute in that under float64 too.
TOLERANCE, TOLERANCE_IN_16_BITS = 1e-5, TOLERANCES[torch.bfloat16]
# Of two runs of each number, which show some of the roundings that there may be.
MOVES = 16.0
# Of a share of tokens, in float32.
_ROUNDING = 2e-7
# What Lightning adds to a name under which a number is monitored.
_SUFFIXES = ("_step", "_epoch", "/dataloader_idx_")
_REDUCE: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "min": min,
    "max": max,
}


@dataclass(frozen=True)
class RankNumbers:
    """The numbers of a step on one rank, by name.

    Args:
        sequence_rank: of the rank.
        whole: of its group's crop as one device runs it.
        again: of the same once more.
        sharded: of this rank's part.
        in_16_bits: whether the weights are in those.
        moves: how far a number of the whole moves where weights do by a rounding.
    """

    sequence_rank: int
    whole: Mapping[str, Number]
    again: Mapping[str, Number]
    sharded: Mapping[str, Number]
    in_16_bits: bool
    moves: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """A number that one device would show otherwise."""

    name: str
    rank: int
    shown: Number
    wanted: float

    def describe(self) -> str:
        """Return it in words."""
        how = f"{self.shown.reduced} of the ranks" if self.shown.reduced else f"rank {self.rank}"
        return f"{self.name} = {self.shown.value:.6g} ({how}), on one device {self.wanted:.6g}"


def differences(of_ranks: Sequence[RankNumbers]) -> list[Difference]:
    """Return the numbers that are not those of one device. Pure.

    Args:
        of_ranks: of every rank of the world, in order.
    """
    names = list(dict.fromkeys(name for each in of_ranks for name in each.sharded))
    found = (_difference(name, of_ranks) for name in names)
    return [each for each in found if each is not None]


def _difference(name: str, of_ranks: Sequence[RankNumbers]) -> Difference | None:
    having = [(rank, each) for rank, each in enumerate(of_ranks) if name in each.sharded and name in each.whole]
    if not having or not all(each.again.get(name) == each.whole[name] for _, each in having):
        return None
    reduced = having[0][1].sharded[name].reduced
    if reduced == "sum" and _counted_once(name, of_ranks):
        return None
    if reduced in _REDUCE:
        reduce = _REDUCE[reduced]
        shown = reduce([each.sharded[name].value for _, each in having])
        groups = [each.whole[name].value for _, each in having if each.sequence_rank == 0]
        pairs = [(having[0][0], shown, reduce(groups) if groups else math.nan)]
    else:
        pairs = [(rank, each.sharded[name].value, each.whole[name].value) for rank, each in having]
    tolerance, floor = (TOLERANCE_IN_16_BITS, 1.0) if of_ranks[0].in_16_bits else (TOLERANCE, 0.0)
    if name.endswith(WEIGHT) and _of_shapes(name, of_ranks):
        return None
    rounded = MOVES * sum(each.moves.get(name, 0.0) for _, each in having)
    for rank, shown, wanted in pairs:
        allowed = max(tolerance * max(abs(shown), abs(wanted), floor), rounded)
        if math.isfinite(wanted) and not abs(shown - wanted) <= allowed:
            return Difference(name, rank, Number(shown, reduced), wanted)
    return None


def coarse_numbers(of_ranks: Sequence[RankNumbers], tokens: int) -> dict[str, float]:
    """Return logged numbers that agree, and may do so by chance: shares and counts of a crop's tokens, an untrained model's accuracy of 0. Pure.

    Args:
        of_ranks: of every rank of the world, in order.
        tokens: of the crop.
    """
    found = {
        name: number.value
        for each in of_ranks
        for name, number in each.sharded.items()
        if name in each.whole and number.logged and number.reduced in ("", *_REDUCE)
    }
    return {name: value for name, value in found.items() if _is_coarse(value, tokens)}


def rounded_numbers(of_ranks: Sequence[RankNumbers]) -> dict[str, float]:
    """Return the numbers that agree as roundings of 0 do: a LayerNorm's mean, until its bias has learned. Pure.

    Args:
        of_ranks: of every rank of the world, in order.
    """
    differ = {each.name for each in differences(of_ranks)}
    found = differences([replace(each, moves={}) for each in of_ranks])
    return {each.name: each.wanted for each in found if each.name not in differ}


def _is_coarse(value: float, tokens: int) -> bool:
    if not math.isfinite(value):
        return False
    nearest = Fraction(value).limit_denominator(tokens)
    return abs(float(nearest) - value) <= _ROUNDING * max(abs(value), 1 / tokens)


def counted_once(of_ranks: Sequence[RankNumbers]) -> dict[str, bool]:
    """Return which sums the ranks of each sequence have together, and which each rank has a part of; not those of which both may be. Pure.

    Args:
        of_ranks: of every rank of the world, in order.
    """
    names = dict.fromkeys(name for each in of_ranks for name, number in each.sharded.items() if number.reduced == "sum")
    found = {name: _counted_once(name, of_ranks) for name in names}
    return {name: once for name, once in found.items() if once is not None}


def _counted_once(name: str, of_ranks: Sequence[RankNumbers]) -> bool | None:
    having = [each for each in of_ranks if name in each.sharded and name in each.whole]
    groups = [each for each in having if each.sequence_rank == 0]
    if len(having) < len(of_ranks) or len(groups) == len(having):
        return None
    wanted, once, of_all = (
        sum(each.whole[name].value for each in groups),
        sum(each.sharded[name].value for each in groups),
        sum(each.sharded[name].value for each in having),
    )
    tolerance, floor = (TOLERANCE_IN_16_BITS, 1.0) if of_ranks[0].in_16_bits else (TOLERANCE, 0.0)
    fits = [
        abs(shown - wanted) <= tolerance * max(abs(shown), abs(wanted), floor) < math.inf for shown in (once, of_all)
    ]
    return fits[0] if fits[0] != fits[1] else None


def _of_shapes(name: str, of_ranks: Sequence[RankNumbers]) -> bool:
    """Return whether all ranks of each sequence have the same: what is made of shapes alone weighs batches as the whole does."""
    groups: list[list[Number | None]] = []
    for each in of_ranks:
        if each.sequence_rank == 0 or not groups:
            groups.append([])
        groups[-1].append(each.sharded.get(name))
    return all(len(set(group)) == 1 for group in groups)


def described(differ: Sequence[Difference], step: str, monitored: Collection[str]) -> str:
    """Return a warning that names the numbers that differ, with the fix.

    Args:
        differ: of all ranks, alike on all.
        step: in words, with the crop.
        monitored: names of numbers that decide about the run.

    Raises:
        SequenceParallelError: one of them is monitored.
    """
    text = (
        f"preflight: {step} shows other numbers than one device: {'; '.join(each.describe() for each in differ)}; for a number that a "
        "rank makes of its own tokens alone: use a torchmetrics metric, lightning_sp.reductions (batch_mean(x, mask), unshard(x)), "
        "global_view=True, or sync_dist=True for a mean over equally many tokens. A number that all ranks of a sequence have, counted by each: "
        "self.metric.process_group = self.trainer.strategy.data_parallel_group counts it once. A batch_size that counts a rank's own tokens: "
        "sync_dist=True adds them up"
    )
    if any(each.name.endswith(ATTRIBUTE) for each in differ):
        text += (
            ". What a step leaves in an attribute is this rank's own: a later step, or the end of the epoch, would read that; make it of "
            "lightning_sp.reductions, or add it up over the ranks before it is used"
        )
    if decides := sorted({name for name in monitored if any(_is_of(name, each.name) for each in differ)}):
        raise SequenceParallelError(
            f"{text}. {', '.join(decides)} is monitored: checkpoints, early stopping or the learning rate would follow a wrong number; "
            "preflight=False switches this check off"
        )
    return text


def described_coarse(coarse: Mapping[str, float], step: str) -> str:
    """Return in words that numbers of `coarse_numbers` prove nothing.

    Args:
        coarse: of all ranks, alike on all; of `rounded_numbers`, too.
        step: in words, with the crop.
    """
    shown = ", ".join(f"{name} = {value:.6g}" for name, value in coarse.items())
    return f"preflight: {step} shows {shown}, whole and sharded: shares or counts of tokens, or roundings of 0, that may agree by chance"


def _is_of(monitored: str, name: str) -> bool:
    """Return whether a monitored name is that of a logged number."""
    name = name.removesuffix(WEIGHT)
    return monitored == name or (monitored.startswith(name) and monitored.removeprefix(name).startswith(_SUFFIXES))
