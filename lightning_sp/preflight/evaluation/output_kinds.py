"""Of what a step's outputs are made: those that a comparison with one device has shown, and those that come later.

{"ids": Tensor}     compared         {"ids": Tensor, "n": int}      not: an n of a rank's part would go unseen
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sp.step.results.kept_values import KeptValues
from lightning_sp.step.results.output_structure import Kinds, kinds_of

# Later outputs of other kinds so many are compared: one may name its entries by the samples.
_MOST = 4


def returned_and_kept(output: Any, kept: KeptValues | None) -> Kinds:
    """Return of what a step's outputs are made.

    Args:
        output: what it returns; None where nobody reads that.
        kept: what it keeps for later; None where nothing is.
    """
    return kinds_of({"returns": output, "keeps": {} if kept is None else kept.new()})


class OutputKinds:
    """What was compared of each step; a class because later steps ask."""

    def __init__(self) -> None:
        self._compared: defaultdict[str, Kinds] = defaultdict(frozenset)
        self._times: Counter[str] = Counter()

    def note(self, of: str, kinds: Kinds) -> None:
        """Remember what was compared of a step."""
        self._compared[of] |= kinds

    def may_have_new(self, of: str) -> bool:
        """Return whether a later output is looked at; the same on all ranks."""
        return bool(self._compared.get(of)) and self._times[of] <= _MOST

    def are_new(self, of: str, kinds: Kinds) -> bool:
        """Return whether there is one that none compared has shown."""
        return not kinds <= self._compared[of]

    def compare_again(self, of: str) -> bool:
        """Count a comparison of a later output, and return whether it is made; all ranks call it. The first that is not is warned of."""
        self._times[of] += 1
        if self._times[of] == _MOST + 1:
            rank_zero_warn(
                f"{of} has returned or kept something of another kind {_MOST + 1} times, and was compared with one device {_MOST} times: "
                "what is new from here on is not"
            )
        return self._times[of] <= _MOST
