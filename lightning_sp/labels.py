"""Labels of next-token prediction: the value that marks a position without a target, and the shift, on whole sequences alone."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

# torch's own default of `ignore_index` in cross entropy, and Hugging Face's convention.
IGNORE_INDEX = -100


def shift_labels(labels: Tensor) -> Tensor:
    """Return the target of each position: the label behind it, `IGNORE_INDEX` for the last.

    On a shard the target at its edge would be lost: shift whole sequences, then shard.

    Shapes: (B, S) -> (B, S).
    """
    return F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]
