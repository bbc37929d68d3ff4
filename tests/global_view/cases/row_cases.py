"""Rows of a batch and tokens that lists, masks and numbers choose to be written, differences and pixels: as users write them on activations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.global_view.whole import Case, Whole


def lists_written(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    rows, row, some = x.flatten(0, 1) * 1, x[0] * 1, x * 1
    rows[[9, 0, 6]] += 1.5
    rows[[1, 2]] = x[0, :2] * 3
    rows[[-1, 4]] = 0.5
    row[[3, 1]] = x[1, :2]
    some[[True, False]] = 2
    return rows, row, some


def rows_dropped(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    """Classifier-free guidance drops the condition of some rows."""
    drops, others, chosen = torch.tensor([True, False]), torch.tensor([False, True]), x * 1
    without, vector, heads = x * 1, x * 1, x.view(2, -1, 2, 4).transpose(1, 2) * 1
    without[drops] = 0
    vector[drops] = w.bias
    heads[torch.tensor([[True, False], [True, True]])] = 3
    chosen[others] = x[others] * 2
    chosen[x.mean((1, 2)) > 100] = 7
    return without, vector, heads, chosen


def added_by_numbers(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    """Two of them add to the same token."""
    rows, at = torch.tensor([0, 1, 0]), torch.tensor([3, 9, 3])
    one = (x * 1).index_put_((rows, at, torch.tensor([1, 2, 1])), w.bias[0] * 2, accumulate=True)
    flat = x.flatten(0, 1).index_put((torch.tensor([2, 20, 5, 5]),), w.weight[:4], accumulate=True)
    return x.index_put((rows, at), x[:, :3].mean(0) + w.weight[:3], accumulate=True), one, flat


def differences_of_neighbours(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    behind = x[..., :1] * 2
    return x.diff(), torch.diff(x, n=2, append=behind), x.diff(dim=0), x.flatten(0, 1).diff(dim=1), (x > 0).diff(dim=-1)


def of_several_dims(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    of_heads = F.normalize(x.view(2, -1, 2, 4), dim=(-1, -2))
    return F.normalize(x, dim=(1, 2)), F.normalize(x, p=1, dim=(0, 1, 2)), of_heads


def blocks(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    distances = F.pdist(x[0]), F.pdist(x[1], p=1).mean()
    return (
        torch.kron(x, w.weight[:1, :2]),
        torch.kron(w.weight[:2, :2], x),
        torch.block_diag(x[0], w.weight, x[1]),
        *distances,
    )


def sampled_by_sums(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    sums = x.detach().softmax(-1).cumsum(-1)
    drawn = torch.rand(*x.shape[:2], 3, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
    return torch.searchsorted(sums, torch.full((*x.shape[:2], 1), 0.5, dtype=x.dtype)), torch.searchsorted(sums, drawn)


def pixels(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    """The sequence in the rows of pixels, in their columns, and in both."""
    high = x.mT[..., None].expand(-1, -1, -1, 4)
    wide, grid = high.mT, x[:, :12].mT.unflatten(-1, (6, 2))
    shuffled = [F.pixel_shuffle(each, 2) for each in (high, wide, grid)]
    again = [F.pixel_unshuffle(each, 2) for each in (high[:, :, :12], wide[..., :12], grid)]
    columns = F.unfold(grid, 2), F.unfold(grid, (3, 1), padding=1, stride=(1, 2))
    return *shuffled, *again, *columns


ROW_CASES: dict[str, Case] = {
    "written by lists": lists_written,
    "written by rows": rows_dropped,
    "written by numbers that add": added_by_numbers,
    "differences of other dims": differences_of_neighbours,
    "lengths of several dims": of_several_dims,
    "blocks beside each other": blocks,
    "classes sampled by sums": sampled_by_sums,
    "pixels": pixels,
}
