"""Pictures whose rows or columns of pixels are the sequence: pixels exchanged with channels, and windows as columns.

Written out as functions that have rules. Shapes: B rows, C channels, H x W pixels.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_sp.global_view.calls.call import NO_RULE, Call, Rule, named


def pixel_shuffle(call: Call) -> Any:
    """Put channels beside each other as pixels."""
    x, factor = call.argument(0, "input"), call.argument(1, "upscale_factor")
    if x.shape[-3] % (factor * factor):
        return NO_RULE
    parted = x.unflatten(-3, (-1, factor, factor))  # (..., C, f, f, H, W)
    return parted.movedim(-4, -2).movedim(-4, -1).flatten(-2).flatten(-3, -2)


def pixel_unshuffle(call: Call) -> Any:
    """Put the pixels of each square behind each other as channels."""
    x, factor = call.argument(0, "input"), call.argument(1, "downscale_factor")
    if x.shape[-1] % factor or x.shape[-2] % factor:
        return NO_RULE
    parted = x.unflatten(-1, (-1, factor)).unflatten(-3, (-1, factor))  # (..., C, H, f, W, f)
    return parted.movedim(-3, -4).movedim(-1, -3).flatten(-5, -3)


def columns(call: Call) -> Any:
    """Return the columns of all windows, as `F.unfold`. Shapes: (B, C, H, W) -> (B, C * window, windows)."""
    x, size, dilation, padding, stride = call.args[:5]
    (high, wide), (down, right), (above, left) = map(_pair, (size, stride, padding))
    if x.dim() != 4 or _pair(dilation) != (1, 1):
        return NO_RULE
    padded: Tensor = F.pad(x, (left, left, above, above)) if above or left else x
    found = padded.unfold(2, high, down).unfold(3, wide, right)  # (B, C, windows, windows, high, wide)
    return found.permute(0, 1, 4, 5, 2, 3).flatten(4, 5).flatten(1, 3)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


RULES: dict[str, Rule] = {
    **named("pixel_shuffle", pixel_shuffle),
    **named("pixel_unshuffle", pixel_unshuffle),
    **named("im2col", columns),
}
