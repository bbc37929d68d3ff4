"""Losses of models that shift labels by hand, and leave out tokens whose next one the mask hides (Qwen2-Audio).

    logits[:, :-1][mask[:, 1:] != 0], labels[:, 1:][mask[:, 1:] != 0] -> cross entropy

On a shard the last target would be lost, and a part of the mask would stand for the whole. Here the model gives its logits alone; the targets
are its labels, shifted on the whole sequence.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext
from lightning_sp.labels import IGNORE_INDEX
from lightning_sp.layout import pad, shard
from lightning_sp.rewrite.hugging_face.generation import delete_attribute
from lightning_sp.rewrite.hugging_face.losses.given_labels import targets_of
from lightning_sp.rewrite.hugging_face.models import own_class
from lightning_sp.rewrite.hugging_face.whole_sequence import whole_tokens

# In the source of such a forward.
_SELECTION = "shift_attention_mask"


def replace_own_shift(model: Any, context: SequenceContext, undo: ExitStack) -> None:
    """Compute the loss of a model that shifts labels by the mask from the targets of the whole sequence; `undo` takes that back."""
    if not _shifts_by_mask(model):
        return
    original, own = model.forward, vars(model).get("forward")
    signature = inspect.signature(original)

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        step, given = context.step, signature.bind(*args, **kwargs)
        labels = given.arguments.get("labels")
        if step is None or context.mesh.layout.size == 1 or labels is None:
            return original(*args, **kwargs)
        given.arguments["labels"] = None
        output = original(*given.args, **given.kwargs)
        mask = given.arguments.get("attention_mask")
        targets = targets_of(context, labels, output[0].device)
        if isinstance(mask, Tensor):
            targets = targets.masked_fill(_next_is_hidden(context, step.batch, mask), IGNORE_INDEX)
        if isinstance(output, tuple):
            return F.cross_entropy(output[0].flatten(0, 1), targets.flatten()), *output
        loss = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
        return type(output)(**{**output, "loss": loss})

    model.forward = forward
    if own is None:
        undo.callback(delete_attribute, model, "forward")
    else:
        undo.callback(setattr, model, "forward", own)


def _shifts_by_mask(model: Any) -> bool:
    try:
        source = inspect.getsource(own_class(model).forward)  # type: ignore[attr-defined]
    except (OSError, TypeError):
        return False
    return _SELECTION in source


def _next_is_hidden(context: SequenceContext, batch: SequenceInfo, mask: Tensor) -> Tensor:
    """Return where the mask hides the next token of the sequence: (rows, tokens of this rank) both."""
    whole = whole_tokens(context, batch, mask)
    following = torch.cat([whole[:, 1:], torch.zeros_like(whole[:, :1])], 1)
    padded = pad(following, batch.padded_length, dim=1, value=0)
    return shard(padded, batch.layout, context.mesh.sequence_rank, dim=1) == 0
