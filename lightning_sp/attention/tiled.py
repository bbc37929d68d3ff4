"""A local kernel in plain torch, for what the fused ones do not compute: tile by tile, so that no more than TILE x TILE scores a head exist.

    scores s = cap(scale q k^T),  cap(x) = x, or softcap tanh(x / softcap)          forward: running maximum and sum over the key tiles
    backward: p = exp(s - lse),  ds = p (dO v^T - sum(dO out)),  dx = ds cap'(x),  cap' = 1 - (s / softcap)^2

Any device, float64 to float16; sums in no less than float32. Source: FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2; softcap: Gemma 2,
arXiv:2408.00118, section 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_sp.attention.merge import accumulator_dtype

TILE = 512


class TiledKernel:
    """Attention of one block by tiles of matrix products.

    Args:
        softcap: bound of the scores; 0 for none.
        tile: queries and keys of a tile.
    """

    name = "torch tiled matmul"

    def __init__(self, softcap: float = 0.0, tile: int = TILE) -> None:
        self.softcap, self.tile = softcap, tile

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of one block."""
        batch, heads, length, dim = q.shape
        dtype = accumulator_dtype(q.dtype)
        out = q.new_empty(batch, length, heads, dim).transpose(1, 2)
        lse = q.new_empty((batch, heads, length), dtype=dtype)
        for rows in _tiles(length, self.tile):
            queries = _grouped(q[:, :, rows], k.shape[1], dtype)
            top = queries.new_full((*queries.shape[:3], 1), -math.inf)
            total, mixed = torch.zeros_like(top), torch.zeros_like(queries)
            for columns in self._columns(rows, k.shape[2], causal):
                scores = self._scores(queries, k, rows, columns, causal, scale)
                highest = torch.maximum(top, scores.amax(-1, keepdim=True))
                weights, kept = torch.exp(scores - highest), torch.exp(top - highest)
                total = total * kept + weights.sum(-1, keepdim=True)
                mixed = mixed * kept + weights @ v[:, :, columns].to(dtype)
                top = highest
            shape = (batch, heads, -1, dim)
            out[:, :, rows] = (mixed / total).reshape(shape).to(q.dtype)
            lse[:, :, rows] = (top + total.log()).reshape(batch, heads, -1)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of one block from the global out and lse."""
        dtype, kv_heads = accumulator_dtype(q.dtype), k.shape[1]
        dq = q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)
        dk, dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
        for rows in _tiles(q.shape[2], self.tile):
            queries, grads = (_grouped(t[:, :, rows], kv_heads, dtype) for t in (q, grad))
            delta = (grads * _grouped(out[:, :, rows], kv_heads, dtype)).sum(-1, keepdim=True)
            norm = _grouped(lse[:, :, rows, None], kv_heads, dtype)
            dq_rows = torch.zeros_like(queries)
            for columns in self._columns(rows, k.shape[2], causal):
                keys, values = k[:, :, columns].to(dtype), v[:, :, columns].to(dtype)
                scores = self._scores(queries, k, rows, columns, causal, scale)
                weights = torch.exp(scores - norm)
                dv[:, :, columns] += weights.transpose(-1, -2) @ grads
                ds = weights * (grads @ values.transpose(-1, -2) - delta) * scale
                if self.softcap:
                    # Where a key is masked the score is -inf and its weight 0: no gradient, and not 0 times infinity.
                    ds = ds * (1 - (scores / self.softcap).square()).masked_fill(scores == -math.inf, 0.0)
                dq_rows += ds @ keys
                dk[:, :, columns] += ds.transpose(-1, -2) @ queries
            dq[:, :, rows] = dq_rows.reshape(*q.shape[:2], -1, q.shape[3]).to(q.dtype)
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def _columns(self, rows: slice, num_keys: int, causal: bool) -> Iterator[slice]:
        """Yield the tiles of keys that some query of a tile sees."""
        return _tiles(min(rows.stop, num_keys) if causal else num_keys, self.tile)

    def _scores(self, queries: Tensor, k: Tensor, rows: slice, columns: slice, causal: bool, scale: float) -> Tensor:
        """Return the scores of a tile. Shapes: queries (B, K, G rows, D), k (B, K, S, D) -> (B, K, G rows, columns)."""
        scores = (queries @ k[:, :, columns].to(queries.dtype).transpose(-1, -2)) * scale
        if self.softcap:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if causal and columns.stop > rows.start + 1:
            own = torch.arange(rows.start, rows.stop, device=k.device).repeat(
                queries.shape[2] // (rows.stop - rows.start)
            )
            scores.masked_fill_(torch.arange(columns.start, columns.stop, device=k.device) > own[:, None], -math.inf)
        return scores


def _tiles(length: int, tile: int) -> Iterator[slice]:
    for start in range(0, length, tile):
        yield slice(start, min(start + tile, length))


def _grouped(tensor: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """Lay the query heads that share a key-value head one after the other: one product serves them, and no key is repeated.

    Shapes: (B, H, S, D) -> (B, K, H / K S, D).
    """
    batch, heads, length, dim = tensor.shape
    return tensor.to(dtype).reshape(batch, kv_heads, heads // kv_heads * length, dim)
