"""A local kernel in plain torch, for what the fused ones do not compute: tile by tile, so that no more than one tile of scores a head exists.

    scores s = change(scale q k^T), `scores`                        forward: running maximum and sum over the key tiles
    backward: p = exp(s - lse),  ds = p (m dO v^T - sum(dO out)),   m: what dropout multiplies a weight with; through `change` to q k^T

Any device, float64 to float16; sums in no less than float32. Source: FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2; softcap: Gemma 2,
arXiv:2408.00118, section 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_sp.attention.spec.accumulator import accumulator_dtype
from lightning_sp.attention.spec.positions import ScorePositions
from lightning_sp.attention.spec.scores import SCORE_TILE, ScoreGradients, Scores
from lightning_sp.devices import makes_host_wait


class TiledKernel:
    """Attention of one block by tiles of matrix products.

    Args:
        scores: what changes the scores.
        gradients: where the backward adds the gradients of what of it is learned.
        tile: queries and keys of a tile.
    """

    name = "torch tiled matmul"

    def __init__(
        self, scores: Scores | None = None, gradients: ScoreGradients | None = None, tile: int = SCORE_TILE
    ) -> None:
        self.scores = Scores() if scores is None else scores
        self.gradients = ScoreGradients.like(self.scores, False) if gradients is None else gradients
        self.tile = tile

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, positions: ScorePositions | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of one block; 0 and -inf for a query that sees none of it."""
        assert positions is not None or not self.scores.names()
        batch, heads, length, dim = q.shape
        dtype = accumulator_dtype(q.dtype)
        out = q.new_empty(batch, length, heads, dim).transpose(1, 2)
        lse = q.new_empty((batch, heads, length), dtype=dtype)
        for rows in _tiles(length, self.tile):
            queries = _grouped(q[:, :, rows], k.shape[1], dtype)
            top = queries.new_full((*queries.shape[:3], 1), -math.inf)
            total, mixed = torch.zeros_like(top), torch.zeros_like(queries)
            for columns, here, hidden in self._columns(rows, k.shape[2], causal, positions):
                _, scores = self._scores(queries, k, rows, columns, causal, scale, here, hidden)
                highest = torch.maximum(top, scores.amax(-1, keepdim=True))
                # Where no key was visible yet there is no maximum to subtract.
                shift = highest.masked_fill(highest == -math.inf, 0.0) if self.scores.hides else highest
                weights, decay = torch.exp(scores - shift), torch.exp(top - shift)
                total = total * decay + weights.sum(-1, keepdim=True)
                mixed = mixed * decay + self._dropped(weights, here) @ v[:, :, columns].to(dtype)
                top = highest
            shape = (batch, heads, -1, dim)
            if self.scores.hides:
                mixed = mixed.masked_fill(total == 0, 0.0)
                out[:, :, rows] = (mixed / total.masked_fill(total == 0, 1.0)).reshape(shape).to(q.dtype)
            else:
                out[:, :, rows] = (mixed / total).reshape(shape).to(q.dtype)
            lse[:, :, rows] = (top + total.log()).reshape(batch, heads, -1)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float,
        positions: ScorePositions | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv) of one block from the global out and lse."""
        assert positions is not None or not self.scores.names()
        dtype, kv_heads = accumulator_dtype(q.dtype), k.shape[1]
        dq = q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)
        dk, dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
        for rows in _tiles(q.shape[2], self.tile):
            queries, grads = (_grouped(t[:, :, rows], kv_heads, dtype) for t in (q, grad))
            delta = (grads * _grouped(out[:, :, rows], kv_heads, dtype)).sum(-1, keepdim=True)
            norm = _grouped(lse[:, :, rows, None], kv_heads, dtype)
            # A query that saw nothing anywhere has lse -inf, and gives all its weights 0.
            norm = norm.masked_fill(norm == -math.inf, math.inf)
            dq_rows = torch.zeros_like(queries)
            for columns, here, hidden in self._columns(rows, k.shape[2], causal, positions):
                keys, values = k[:, :, columns].to(dtype), v[:, :, columns].to(dtype)
                raw, scores = self._scores(queries, k, rows, columns, causal, scale, here, hidden)
                weights = torch.exp(scores - norm)
                dv[:, :, columns] += self._dropped(weights, here).transpose(-1, -2) @ grads
                ds = weights * (self._dropped(grads @ values.transpose(-1, -2), here) - delta)
                if here is not None:
                    shape = _tile_shape(ds, here)
                    ds = self.scores.backward(ds.view(shape), raw.view(shape), here, self.gradients).view(ds.shape)
                ds = ds * scale
                dq_rows += ds @ keys
                dk[:, :, columns] += ds.transpose(-1, -2) @ queries
            dq[:, :, rows] = dq_rows.reshape(*q.shape[:2], -1, q.shape[3]).to(q.dtype)
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def _columns(
        self, rows: slice, num_keys: int, causal: bool, positions: ScorePositions | None
    ) -> Iterator[tuple[slice, ScorePositions | None, Tensor | None]]:
        """Yield the tiles of keys that some query of a tile sees, where they lie, and what a mask hides of them."""
        for columns in _tiles(min(rows.stop, num_keys) if causal else num_keys, self.tile):
            here = None if positions is None else positions.part(queries=rows, keys=columns)
            hidden = None if here is None else self.scores.hidden(here)
            # A tile of which nothing is visible adds nothing to any sum: the blocks of documents that a function parts are most of a sequence.
            # A device is not asked: the host would wait for each tile.
            if hidden is None or makes_host_wait(hidden) or not bool(hidden.all()):
                yield columns, here, hidden

    def _scores(
        self, queries: Tensor, k: Tensor, rows: slice, columns: slice, causal: bool, scale: float, here: ScorePositions | None,
        hidden: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the scores of a tile, as q k^T gives them and changed.

        Shapes: queries (B, K, G rows, D), k (B, K, S, D) -> (B, K, G rows, columns).
        """
        raw = (queries @ k[:, :, columns].to(queries.dtype).transpose(-1, -2)) * scale
        scores = raw
        if here is not None:
            scores = self.scores.apply(raw.view(_tile_shape(raw, here)), here, hidden).view(raw.shape)
        if causal and columns.stop > rows.start + 1:
            own = torch.arange(rows.start, rows.stop, device=k.device).repeat(
                queries.shape[2] // (rows.stop - rows.start)
            )
            hidden = torch.arange(columns.start, columns.stop, device=k.device) > own[:, None]
            scores = scores.masked_fill(hidden, -math.inf)
        return raw, scores

    def _dropped(self, weights: Tensor, here: ScorePositions | None) -> Tensor:
        """Return the weights after dropout. Shapes: (B, K, G rows, columns) -> the same."""
        dropout = self.scores.dropout
        if dropout is None or here is None:
            return weights
        keep = dropout.keep(here).view(weights.shape)
        return (weights / (1.0 - dropout.probability)).masked_fill(~keep, 0.0)


def _tile_shape(tile: Tensor, positions: ScorePositions) -> tuple[int, int, int, int]:
    """Return the shape by query heads: those that share a key-value head lie one after the other."""
    return tile.shape[0], positions.heads[1] - positions.heads[0], len(positions.queries), tile.shape[-1]


def _tiles(length: int, tile: int) -> Iterator[slice]:
    for start in range(0, length, tile):
        yield slice(start, min(start + tile, length))


def _grouped(tensor: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """Lay the query heads that share a key-value head one after the other: one product serves them, and no key is repeated.

    Shapes: (B, H, S, D) -> (B, K, H / K S, D).
    """
    batch, heads, length, dim = tensor.shape
    return tensor.to(dtype).reshape(batch, kv_heads, heads // kv_heads * length, dim)
