"""The target of each position of a whole batch, before sharding: an entry of the batch, or its labels, shifted where they are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.errors import SequenceParallelError
from lightning_sp.labels import shift_labels

TARGET_NAMES = ("shift_labels", "targets")


def batch_targets(entries: Mapping[str, Any], dims: Mapping[str, int], options: ShardOptions) -> Tensor | None:
    """Return the target of each position of a whole batch, None where it has none.

    Args:
        entries: of the batch.
        dims: of those that carry its sequence: a class of each row, (B,), is no target of a position.
        options: what is known of labels.

    Raises:
        SequenceParallelError: nothing says whether its labels are shifted.
    """
    for name in TARGET_NAMES:
        if name in dims:
            found: Tensor = entries[name]
            return found
    if "labels" not in dims:
        return None
    labels: Tensor = entries["labels"]
    if options.labels_shifted is None and not options.model_shifts_labels:
        if not options.is_split:
            return labels  # as they are: the step shifts them whole, or not
        raise SequenceParallelError(
            "the batch has 'labels', and nothing says whether they are shifted: pass labels_shifted=True when labels[t] is the target of "
            "position t, labels_shifted=False when it is input_ids[t] (Hugging Face's convention; the model then shifts), "
            "or name them 'shift_labels'"
        )
    if options.labels_shifted:
        return labels
    return shift_labels(labels)
