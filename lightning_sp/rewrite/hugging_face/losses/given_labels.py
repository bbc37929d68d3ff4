"""Labels that a step hands to a model -> the targets of this rank's tokens, shifted on the whole sequence.

The labels may be others than the batch's: some tokens are dropped in the step, or they are made of the ids there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.labels import IGNORE_INDEX, shift_labels
from lightning_sp.layout import pad, shard
from lightning_sp.rewrite.hugging_face.whole_sequence import whole_tokens


def given_shift(context: SequenceContext, given: Tensor | None) -> Tensor | None:
    """Return the shifted labels that a step or its loader gives a model; None for those that sharding has put into the batch.

    Args:
        context: with a step in progress.
        given: the model's argument.
    """
    assert context.step is not None
    batch = context.step.batch
    return None if given is batch.shift_labels and "shift_labels" not in batch.names else given


def targets_of(context: SequenceContext, labels: Tensor, device: torch.device) -> Tensor:
    """Return the targets of this rank's tokens that a model on one device makes of labels: the label behind each.

    The labels are gathered in every step, and never only where they are not the batch's: a rank may drop none where another drops some, and
    would leave it waiting.

    Args:
        context: with a step in progress.
        labels: of this rank's tokens, of any of its rows.
        device: of the model.

    Shapes: (B, s) -> (B, s). Communicates: one all_gather of the labels.

    Raises:
        SequenceParallelError: they are not of this rank's tokens.
    """
    assert context.step is not None
    batch, local = context.step.batch, context.local_length
    if not batch.names and labels is batch.shift_labels:  # sharded by hand, and shifted before
        return labels
    if labels.dim() != 2 or labels.shape[1] != local:
        raise SequenceParallelError(
            f"the model computes its loss from labels {tuple(labels.shape)}, where this rank has {local} tokens of each of {batch.rows} rows: "
            "which tokens they belong to is not known; give a label for each token, -100 where none counts, or compute the loss in "
            "training_step from the logits"
        )
    whole = shift_labels(whole_tokens(context, batch, labels.to(device)))
    padded = pad(whole, batch.padded_length, dim=1, value=IGNORE_INDEX)
    return shard(padded, batch.layout, context.mesh.sequence_rank, dim=1)
