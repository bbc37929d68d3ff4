"""More of what a user may write with a tensor of the sequence: writing into it, blocks of it, chosen tokens, experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.global_view.whole import E, H, Case, Whole


def written_slices(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """Features of one place are written into the next; single tokens, whole tensors and every second one."""
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    y[:, 0] = w.rows
    y[:, 3:5] = w.positions[3:5].sin()
    y[:, ::4, :2] = x[:, ::4, 2:4] * 3
    y[:, -1, 1] = 5.0
    y[..., 4:6] = w.positions[:, :2]
    y[0, 2:6] = x[1, 1:5]
    return y.tanh()


def written_by_masks(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    y = x * 2
    y[ids == 3] = w.bias
    y[mask == 0] = 0.5
    y[ids == 2] = w.images[: int((ids == 2).sum())]
    y[torch.arange(x.shape[1]).expand(2, -1) == 4] = w.bias.cos()
    return y.sin()


def made_empty(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """As multi-head latent attention joins its keys."""
    first, second = x[:, None].split([3, 5], dim=-1)
    y = x.new_empty(2, H, x.shape[1], E)
    y[..., :3].copy_(first.expand(-1, H, -1, -1))
    y[..., 3:].copy_(second.expand(-1, H, -1, -1).cos())
    return y


MORE_CASES: dict[str, Case] = {
    "slices written": written_slices,
    "written by masks": written_by_masks,
    "new tensor, written": made_empty,
    "rows put by a mask of one feature": lambda x, ids, mask, w: x.masked_scatter((ids == 3).unsqueeze(-1), w.images),
    "rows put into joined rows": lambda x, ids, mask, w: x.flatten(0, 1).masked_scatter(
        (ids == 3).flatten().unsqueeze(-1).expand(-1, E), w.images
    ),
}
