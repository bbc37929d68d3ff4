"""What changes the scores of an attention between q k^T and the softmax's weights, tile by tile, and the gradients of what of it is learned.

    x = scale q k^T      cap: c tanh(x / c)      + bias      score_mod(x, ...)      -inf where the mask hides      softmax      dropout

in this order. The tiled kernel applies it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_sp.attention.spec.accumulator import accumulator_dtype
from lightning_sp.attention.spec.dropout import AttentionDropout
from lightning_sp.attention.spec.function_contents import Contents
from lightning_sp.attention.spec.positions import ScorePositions, rows_or_heads_slice
from lightning_sp.attention.spec.score_mod import MaskMod, ScoreMod
from lightning_sp.devices import makes_host_wait

# Queries and keys of a tile: as many scores a head are in memory at once.
SCORE_TILE = 512


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores:
    """The changes of the scores, each None (or 0) for none.

    Args:
        softcap: bound of the scores.
        bias: added, whole: (rows or 1, heads or 1, S or 1, T), by global positions; beyond its S and T there is padding, whose bias is 0.
        score_mod: a function of the score and its position.
        tensors: what `score_mod` reads, in its stead: the operator's own arguments.
        dense: which keys a query sees, whole, bool, shaped as `bias`; beyond its S and T nothing is visible.
        mask_mod: the same as a function of positions.
        dropout: of the weights.
    """

    softcap: float = 0.0
    bias: Tensor | None = None
    score_mod: ScoreMod | None = None
    tensors: tuple[Tensor, ...] = ()
    dense: Tensor | None = None
    mask_mod: MaskMod | None = None
    dropout: AttentionDropout | None = None

    def names(self) -> list[str]:
        """Return what of it there is, in words."""
        found = {
            "softcap": self.softcap,
            "bias": self.bias is not None,
            "score_mod": self.score_mod,
            "dense mask": self.dense is not None,
            "mask_mod": self.mask_mod,
            "dropout": self.dropout,
        }
        return [name for name, there in found.items() if there]

    @property
    def hides(self) -> bool:
        """Whether a query may see no key of a tile: by a mask, or by -inf in a bias or out of a function."""
        return any(each is not None for each in (self.dense, self.mask_mod, self.bias, self.score_mod))

    def hidden(self, positions: ScorePositions) -> Tensor | None:
        """Return which keys of a tile the dense mask or the function hides; None where there is neither.

        Shapes: () -> (rows or 1, heads or 1, Sq or 1, Sk).
        """
        found = None if self.dense is None else ~_tile_of(self.dense, positions, False)
        if self.mask_mod is None:
            return found
        other = ~self.mask_mod.visible(positions)
        return other if found is None else found | other

    def hidden_by(self, found: Contents) -> Any:
        """Return a value by which scores are equal whose `hidden` is.

        Raises:
            UnknownContentsError: there is none.
        """
        dense = None if self.dense is None else found.of(self.dense)
        return dense, None if self.mask_mod is None else self.mask_mod.contents(found)

    def apply(self, raw: Tensor, positions: ScorePositions, hidden: Tensor | None) -> Tensor:
        """Return the scores of a tile, -inf where a key is `hidden`. Shapes: raw (B, H, Sq, Sk) -> the same."""
        scores = self._before(raw, positions)
        if self.score_mod is not None:
            scores = self.score_mod.apply(scores, positions, self._tensors_like(raw))
        return scores if hidden is None else scores.masked_fill(hidden, -math.inf)

    def backward(self, grad: Tensor, raw: Tensor, positions: ScorePositions, gradients: ScoreGradients) -> Tensor:
        """Return the gradient of the raw scores from that of the changed ones, and add those of what is learned.

        Args:
            grad: of the changed scores, 0 where the mask hides.
            raw: the scores as q k^T gives them.
            positions: of the tile.
            gradients: to add to.

        Shapes: (B, H, Sq, Sk) -> the same.
        """
        if self.score_mod is not None:
            before = self._before(raw, positions)
            grad, learned = self.score_mod.gradients(grad, before, positions, self._tensors_like(raw))
            gradients.add_tensors(learned)
        if gradients.bias is not None:
            _add(gradients.bias, grad, positions)
        if self.softcap:
            grad = grad * (1 - torch.tanh(raw / self.softcap).square())
        return grad

    def _before(self, raw: Tensor, positions: ScorePositions) -> Tensor:
        """Return the scores as `score_mod` takes them."""
        if self.softcap:
            raw = torch.tanh(raw / self.softcap) * self.softcap
        return raw if self.bias is None else raw + _tile_of(self.bias, positions, 0.0).to(raw.dtype)

    def _tensors_like(self, like: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.to(like.dtype) if t.is_floating_point() else t for t in self.tensors)


@dataclass
class ScoreGradients:
    """Gradients of a bias and of a score function's tensors, in the making; a class because tiles add to them.

    Args:
        bias: of the bias, None where none is asked.
        tensors: of each of the function's tensors, None where it takes none.
    """

    bias: Tensor | None = None
    tensors: list[Tensor | None] = field(default_factory=list)

    @classmethod
    def like(cls, scores: Scores, wanted: bool) -> ScoreGradients:
        """Return zeros in the accumulator's dtype for all that can have a gradient; none where none is wanted."""

        def zeros(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or not wanted or not tensor.is_floating_point():
                return None
            # A bias may be a view of any strides (T5's is), its gradient is in order: so says the operator's fake.
            dtype = accumulator_dtype(tensor.dtype)
            return torch.zeros_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)

        return cls(zeros(scores.bias), [zeros(tensor) for tensor in scores.tensors])

    @property
    def are_wanted(self) -> bool:
        """Whether there is anything to add to."""
        return self.bias is not None or any(each is not None for each in self.tensors)

    def add_tensors(self, parts: Sequence[Tensor | None]) -> None:
        """Add a tile's."""
        for gradient, part in zip(self.tensors, parts, strict=True):
            if gradient is not None and part is not None:
                gradient += part


def _tile_of(whole: Tensor, positions: ScorePositions, beyond: float | bool) -> Tensor:
    """Return a tile of a whole bias or mask, with `beyond` where its queries and keys have ended.

    Shapes: (rows or 1, heads or 1, S or 1, T) -> (rows or 1, heads or 1, Sq or 1, Sk).
    """
    part = _of_heads(whole, positions)
    queries, keys = _inside(whole, positions)
    queries_there, keys_there = queries < whole.shape[2], keys < whole.shape[3]
    tile = part[:, :, queries.clamp(max=whole.shape[2] - 1)[:, None], keys.clamp(max=whole.shape[3] - 1)]
    if not makes_host_wait(tile) and bool(queries_there.all()) and bool(keys_there.all()):
        return tile
    return tile.masked_fill(~(queries_there[:, None] & keys_there), beyond)


def _add(whole: Tensor, tile: Tensor, positions: ScorePositions) -> None:
    """Add a tile's gradient to that of the whole, summed over what was broadcast; the mirror of `_tile_of`."""
    queries, keys = _inside(whole, positions)
    there_q, there_k = queries < whole.shape[2], keys < whole.shape[3]
    for dim in (0, 1, 2):
        if whole.shape[dim] == 1:
            tile = tile.sum(dim, keepdim=True)
    part, tile = _of_heads(whole, positions), tile.to(whole.dtype)
    if makes_host_wait(tile):
        # How many there are the host would wait for: what is beyond adds zeros to the last.
        tile = tile.masked_fill(~(there_q[:, None] & there_k), 0.0)
        queries, keys = queries.clamp(max=whole.shape[2] - 1), keys.clamp(max=whole.shape[3] - 1)
        torch.ops.aten.index_put_(part, [None, None, queries[:, None], keys], tile, accumulate=True)
        return
    queries, keys = queries[there_q], keys[there_k]
    # No position comes twice within a tile.
    part[:, :, queries[:, None], keys] += tile[:, :, there_q][..., there_k]


def _inside(whole: Tensor, positions: ScorePositions) -> tuple[Tensor, Tensor]:
    queries = positions.queries.new_zeros(1) if whole.shape[2] == 1 else positions.queries
    return queries, positions.keys


def _of_heads(whole: Tensor, positions: ScorePositions) -> Tensor:
    """Return a view of the rows and heads of a call."""
    return whole[
        rows_or_heads_slice(whole.shape[0], positions.rows), rows_or_heads_slice(whole.shape[1], positions.heads)
    ]
