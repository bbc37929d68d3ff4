"""Windows that are added up again, pools that are undone, and numbers between tokens: each rank has whole lines, of rows and channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_sp.global_view.calls.call import NO_RULE, Call, Rule, is_plain, is_sequence, named, placed
from lightning_sp.global_view.exchange.lines import Lines, lines_of
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor


def folded(call: Call) -> Any:
    """Add up the columns of windows, as `F.fold` does."""
    x, size, kernel, *rest = call.args
    own = x.placement
    if x.dim() != 3 or own.dim == 1 or own.outer * own.inner > 1 or call.kwargs:
        return NO_RULE
    if own.dim == 0:
        return placed(call.on_locals(), own)
    per_window = kernel[0] * kernel[1]
    lines = lines_of(x.unflatten(1, (-1, per_window)), (0, 1))  # (m, windows, kernel)
    if lines is None:
        return NO_RULE
    image = call.function(lines.part.transpose(1, 2), size, kernel, *rest).squeeze(1)  # (m, H, W)
    return _split(lines, image, 2 if size[0] == 1 < size[1] else 1)


def unpooled(call: Call) -> Any:
    """Put what a pool left back in its places."""
    x, places = call.args[:2]
    own = x.placement if is_sequence(x) else None
    if own is None or not is_sequence(places) or x.dim() != 4 or own.dim < 2 or places.placement.dim != own.dim:
        return NO_RULE
    lines, others = lines_of(x, (0, 1)), lines_of(places, (0, 1))
    if lines is None or others is None:
        return NO_RULE
    given = (each.part.movedim(1, own.dim - 1).unsqueeze(1) for each in (lines, others))
    return _split(lines, call.function(*given, *call.args[2:], **call.kwargs).squeeze(1), own.dim - 1)


def sampled(call: Call) -> Any:
    """Take numbers at the places of a grid, between tokens: of whole lines; of a whole image by a grid of the sequence locally."""
    x, grid, *rest = call.args
    if x.dim() != 4 or grid.dim() != 4:
        return NO_RULE
    of_grid = grid.placement.dim if is_sequence(grid) else None
    if is_plain(x):
        own = grid.placement
        if own.dim not in (1, 2):
            return NO_RULE
        return placed(call.on_locals(), own.at(own.dim + 1))
    own = x.placement
    lines = lines_of(x, (0, 1)) if own.dim >= 2 and of_grid in (None, 1, 2) else None
    if lines is None:
        return NO_RULE
    rows = torch.arange(len(x), device=x.device)[:, None].expand(x.shape[:2])
    whole = grid.whole() if is_sequence(grid) else grid
    image = lines.part.movedim(1, own.dim - 1).unsqueeze(1)
    found = call.function(image, whole[lines.of_whole(rows)], *rest, **call.kwargs).squeeze(1)
    return lines.whole(found) if of_grid is None else _split(lines, found, of_grid)


def _split(lines: Lines, image: Tensor, dim: int) -> SequenceTensor:
    """Return images of lines split along a dim. Shapes: (m, H, W) -> (B, C, H, W)."""
    found = lines.split(image.movedim(dim, 1))
    local = found.local.movedim(2, dim + 1).contiguous()
    return SequenceTensor(local, found.placement.at(dim + 1))


RULES: dict[str, Rule] = {
    **named("col2im", folded),
    **named("max_unpool2d", unpooled),
    **named("grid_sampler grid_sampler_2d", sampled),
}
