"""Labels of next-token prediction: the value that marks a position without a target, and the shift, on whole sequences alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# torch's own default of `ignore_index` in cross entropy, and Hugging Face's convention.
IGNORE_INDEX = -100
# In which it would be another class, 156 of bytes. No marks of True and False, which a step may negate.
_WITHOUT_SIGN = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def can_be_ignored(targets: Tensor) -> Tensor:
    """Return targets in a dtype that has `IGNORE_INDEX`: int64 where theirs has no numbers below 0."""
    return targets.long() if targets.dtype in _WITHOUT_SIGN else targets


def shift_labels(labels: Tensor) -> Tensor:
    """Return the target of each position: the label behind it, `IGNORE_INDEX` for the last.

    On a shard the target at its edge would be lost: shift whole sequences, then shard.

    Shapes: (B, S) -> (B, S).
    """
    return F.pad(can_be_ignored(labels), (0, 1), value=IGNORE_INDEX)[:, 1:]
