"""Calls that give each token an outcome: one for all, where later ones may have others; or several, of which a part may lack one.

    dropped = place_in_expert >= capacity        False for every token, until an expert is chosen too often: places are a part's own
    segment = is_separator[ids].cumsum(1)        0 for every token, until a separator comes: a part counts its own
    opened = gate.sigmoid() > 0.5                False for every token, until the gate has learned to open
    weight, expert = router(x).topk(2)           each expert has tokens in every part, until one is chosen by few

Each is a call, known by its line and its number there, so that a whole run and one on a part can show others. Shown, an ordered comparison is
with another number, which about half of the crop's tokens are below; another outcome is turned at tokens that are the same in both runs. Of
what tokens choose, one choice is left to a token of each row, in the first part: the others have none of it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.global_view.table import name_of
from lightning_sp.layout import SequenceLayout, positions
from lightning_sp.preflight.recording.hidden_terms import Call, users_place
from lightning_sp.preflight.recording.users_lines import INSTALLED

_LONG_NAMES = {"greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne"}
_ORDERED, _EQUAL = {"lt", "le", "gt", "ge"}, {"eq", "ne"}
# Functions that say of each token whether something is true.
TRUTHS = _ORDERED | _EQUAL | {"isin", "isnan", "isinf", "isfinite", "isclose", "signbit"}
# Functions that give a whole number for each token, of which 0 and 1 are as good as any.
_CLASSES = {"argmax", "argmin", "floor_divide", "floordiv", "remainder", "mod", "bitwise_and", "and", "bucketize"}
# Functions that give each token's choice among a few, alone or behind its value.
_CHOICES = {"argmax", "argmin", "max", "min", "topk"}
_MOST_CHOICES, _MOST_TRUTHS = 256, 2**16
# Functions that look up an index in a table, by the places of the table and of the index.
_LOOKUPS = {"getitem": (0, 1), "take": (0, 1), "embedding": (1, 0)}
_MOST = 2**20
# Of an odd row's tokens one in so many has another outcome.
_ONE_IN = 8


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Which tokens of a crop a run has. Pure.

    Args:
        rows: of this run.
        first_row: of it, in the crop.
        length: tokens of a row of the crop.
        piece: of which a rank has each whole.
        positions: of this run's tokens.
        once: whether one token of each row alone is turned.
    """

    rows: int
    first_row: int
    length: int
    piece: int
    positions: Tensor
    once: bool = False

    @classmethod
    def of_part(
        cls,
        sequence: SequenceInfo,
        layout: SequenceLayout,
        rank: int | None,
        first_row: int = 0,
        *,
        once: bool = False,
    ) -> Tokens:
        """Return the tokens of a crop that a rank has.

        Args:
            sequence: the crop's.
            layout: of the ranks that share it.
            rank: among those; None of a run of the whole crop.
            first_row: as above.
            once: as above.
        """
        padded = layout.padded_length(sequence.length)
        at = torch.arange(sequence.length) if rank is None else positions(layout, sequence.padded_length, rank)
        piece = max(1, padded // layout.multiple)
        return cls(
            rows=sequence.rows, first_row=first_row, length=sequence.length, piece=piece, positions=at, once=once
        )

    def turned(self, shape: torch.Size, seed: int) -> Tensor | None:
        """Return which outcomes are turned, to be broadcast to a shape; None where it is none of rows and tokens.

        Even rows have one token, in the first piece: what looks for one in a row, or before a token, finds none in other parts. Odd rows have
        the first one of each piece, and others.
        """
        tokens = len(self.positions)
        dims = [dim for dim in range(1, len(shape)) if shape[dim] == tokens]
        if shape and shape[0] == self.rows and len(dims) == 1:
            to = [1] * len(shape)
            to[0], to[dims[0]] = self.rows, tokens
        elif len(shape) and shape[0] == self.rows * tokens and self.rows > 1:
            to = [shape[0], *[1] * (len(shape) - 1)]
        else:
            return None
        rows = self.first_row + self.rows
        of_crop = torch.rand(rows, self.length, generator=torch.Generator().manual_seed(seed)) * _ONE_IN < 1
        of_crop[:: 1 if self.once else 2] = False
        if not self.once:
            of_crop[1::2, :: self.piece] = True
        end = min(self.piece, self.length)
        of_crop[:, end - 1 - seed % (1 + end // 2)] = (
            True  # of two calls in a row not the same one, which they would turn back
        )
        return of_crop[self.first_row :, self.positions.clamp(max=self.length - 1)].reshape(to)


@dataclass(frozen=True, kw_only=True)
class Truths:
    """Which of a crop's tokens something is true of: by this it is known wherever it is asked, in a loop that a part leaves earlier, too.

    Args:
        outcomes: of rows and tokens, (rows, length, ...) bool.
        rare: which outcome is left to one token of each row.
        seed: of these tokens.
    """

    outcomes: Tensor
    rare: bool
    seed: int

    @classmethod
    def of_crop(cls, output: Tensor, tokens: Tokens, call: Call) -> Truths | None:
        """Return those of a whole crop; None where they are too many, or in another order."""
        outcomes = None if output.numel() > _MOST_TRUTHS else _by_tokens(output, tokens)
        return None if outcomes is None else cls(outcomes=outcomes, rare=True, seed=_seed(call))

    def shown(self, output: Tensor, tokens: Tokens) -> Tensor | None:
        """Return other outcomes for a run's tokens; None where its own are not these."""
        found, known = _by_tokens(output, tokens), tokens.positions < tokens.length
        if found is None:
            return None
        rows = self.outcomes[tokens.first_row : tokens.first_row + tokens.rows]
        if not torch.equal(found[:, known], rows[:, tokens.positions[known]]):
            return None
        turned = replace(tokens, once=True).turned(output.shape, self.seed)
        assert turned is not None
        return (turned.to(output.device) == self.rare).expand(output.shape)


# What an ordered comparison is shifted by, or what is looked up elsewhere; a choice that few tokens have, and what the others have in its place;
# a truth; of what is turned nothing.
Other = float | int | tuple[int, int] | Truths | None


class TokenOutcomes(TorchFunctionMode):
    """Notes the user's calls that give one outcome for all tokens, or a few, and shows others in those that are to show them.

    Args:
        tokens: that the run has.
        shown: the calls.
        follows: whether all calls are noted that give outcomes of tokens: of a run on a part, which may lack the others.

    Attributes:
        found: the calls, with how they show others.
    """

    def __init__(self, tokens: Tokens, shown: Mapping[Call, Other], *, follows: bool = False) -> None:
        super().__init__()
        self.found: dict[Call, Other] = {}
        self._tokens, self._shown, self._follows = tokens, shown, follows
        self._truths = [other for other in shown.values() if isinstance(other, Truths)]
        self._numbers: Counter[tuple[str, int, str]] = Counter()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        name = _LONG_NAMES.get(name_of(function), name_of(function))
        of_tokens = _of_tokens(name, args, output)
        if of_tokens is None or self._tokens.turned(of_tokens.shape, 0) is None:
            return output
        place = users_place(sys._getframe(1))
        if place is None or any(folder in place[0] for folder in INSTALLED):
            return output
        key = (*place, name)
        call = Call(*key, self._numbers[key])
        self._numbers[key] += 1
        if self._truths:
            shown = (each.shown(of_tokens, self._tokens) for each in self._truths if name in TRUTHS)
            return next((each for each in shown if each is not None), output)
        if call in self._shown:
            return self._other(call, self._shown[call], function, (args, kwargs), output)
        if self._follows:
            self.found[call] = None
        elif _is_uniform(name, of_tokens, output):
            is_known, other = _other_of(name, args, kwargs, output)
            if is_known:
                self.found[call] = other
        elif name in TRUTHS and not call.number:
            if (truths := Truths.of_crop(of_tokens, self._tokens, call)) is not None:
                self.found[call] = truths
        elif name in _CHOICES and 1 < len(several := torch.unique(of_tokens)) <= _MOST_CHOICES:
            self.found[call] = int(several[-1]), int(several[0])
        return output

    def _other(self, call: Call, other: Other, function: Any, given: tuple[Any, Any], output: Any) -> Any:
        args, kwargs = given
        if call.function in _ORDERED | _EQUAL and isinstance(other, (int, float)):
            return function(args[0] - other, *args[1:], **kwargs)
        index = _of_tokens(call.function, args, output)
        assert index is not None
        tokens = replace(self._tokens, once=True) if isinstance(other, tuple) else self._tokens
        turned = tokens.turned(index.shape, _seed(call))
        assert turned is not None
        turned = turned.to(index.device)
        if call.function not in _LOOKUPS:
            if isinstance(other, tuple):
                rare, common = other
                shown = torch.where(turned, rare, torch.where(index == rare, common, index)).to(index.dtype)
            else:
                shown = torch.where(turned, index.logical_not() if index.dtype is torch.bool else index ^ 1, index)
            return shown if isinstance(output, Tensor) else type(output)((output[0], shown))
        assert isinstance(other, int)
        replaced = [*args]
        replaced[_LOOKUPS[call.function][1]] = torch.where(turned, other, index)
        return function(*replaced, **kwargs)


def _seed(call: Call) -> int:
    return crc32(f"{call.function} {call.line} {call.number}".encode())


def _by_tokens(output: Tensor, tokens: Tokens) -> Tensor | None:
    """Return outcomes of rows and tokens, (B, s, ...) or (B * s, ...), as (B, s, n) on the host; None of others."""
    rows, length = tokens.rows, len(tokens.positions)
    if (not output.dim() or output.shape[0] != rows * length) and output.shape[:2] != (rows, length):
        return None
    return output.detach().reshape(rows, length, -1).cpu()


def _of_tokens(name: str, args: tuple[Any, ...], output: Any) -> Tensor | None:
    """Return what has an outcome for each token: the result, or what is looked up, or chosen."""
    if name in _CHOICES - _CLASSES:  # `max` of two tensors is none
        output = output[1] if isinstance(output, tuple) else None
    if type(output) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(output) or not output.numel():
        return None
    if name in TRUTHS:
        return output if output.dtype is torch.bool else None
    if name in _CLASSES | _CHOICES:
        return None if output.is_floating_point() or output.is_complex() or output.dtype is torch.bool else output
    if name not in _LOOKUPS or len(args) < 2:
        return None
    table, index = (args[place] for place in _LOOKUPS[name])
    if not all(isinstance(each, Tensor) for each in (table, index)) or table.requires_grad or not table.dim():
        return None
    return index if index.dtype in (torch.int64, torch.int32) and len(table) > 1 and table.numel() <= _MOST else None


def _is_uniform(name: str, of_tokens: Tensor, output: Any) -> bool:
    """Return whether all tokens have one outcome: of what is looked up the same row of the table, or others that are alike."""
    if name not in _LOOKUPS:
        return bool((of_tokens == of_tokens.flatten()[0]).all())
    found = output.detach().reshape(of_tokens.numel(), -1)
    return bool((found == found[0]).all())


def _other_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> tuple[bool, Other]:
    """Return whether a call can show other outcomes, and how."""
    if name in _LOOKUPS:
        table, index = (args[place].detach() for place in _LOOKUPS[name])
        rows = table.reshape(-1, 1) if name == "take" else table.reshape(len(table), -1)
        others = (rows != output.detach().reshape(index.numel(), -1)[0]).any(1).nonzero()
        return bool(len(others)), int(others[0]) if len(others) else None
    if name not in _ORDERED | _EQUAL or kwargs or len(args) != 2 or not isinstance(args[0], Tensor):
        return True, None
    return True, _shift(name, args[0].detach(), args[1], output.numel())


def _shift(name: str, a: Tensor, b: Any, numel: int) -> Other:
    """Return what is subtracted from one side of a comparison so that it is true of some and false of others; None for nothing."""
    if numel > _MOST or a.dtype is torch.bool or a.is_complex():
        return None
    apart = a - (b.detach() if isinstance(b, Tensor) else b)
    if not bool(apart.isfinite().all()) or len(values := sorted({*apart.flatten().tolist()})) < 2:
        return None
    if name in _EQUAL:
        return None if apart.is_floating_point() else int(values[len(values) // 2])
    # Between two numbers that lie far from each other: what rounding makes of them is no matter.
    first, end = max(1, len(values) // 3), max(2, 2 * len(values) // 3 + 1)
    at = max(range(first, end), key=lambda each: values[each] - values[each - 1])
    low, high = values[at - 1], values[at]
    if apart.is_floating_point():
        return float(low / 2 + high / 2)
    return int(high if name in ("lt", "ge") else low)
