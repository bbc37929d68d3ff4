"""Which of a Hugging Face model's heads over sequences is given what: single tokens where its structure says which, else whole states."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn

from lightning_sp.context.step import SequenceContext
from lightning_sp.rewrite.hugging_face.encoders.encoder_decoder import is_encoder_decoder
from lightning_sp.rewrite.hugging_face.heads.single_tokens import (
    give_single_tokens,
    picks_before_pooler,
    takes_first_token,
)
from lightning_sp.rewrite.hugging_face.heads.whole_states import give_whole_states
from lightning_sp.rewrite.hugging_face.models import own_class


def give_whole_sequences_to_heads(model: Any, context: SequenceContext, undo: ExitStack) -> None:
    """Hook a model's heads; `undo` takes that back."""
    hooks = give_single_tokens(model, context)
    if not _is_known(model):
        hooks += give_whole_states(model, context)
    for hook in hooks:
        undo.callback(hook.remove)


def _is_known(model: Any) -> bool:
    """Return whether a model has no head over whole sequences, or one whose single tokens are known by its structure."""
    name = own_class(model).__name__
    if "ForQuestionAnswering" in name:
        return isinstance(getattr(model, "qa_outputs", None), nn.Module)
    if "ForSequenceClassification" not in name:
        return True
    if is_encoder_decoder(model):  # pools the decoder's states at the last end-of-sequence token
        return False
    known = isinstance(getattr(model, "score", None), nn.Module)
    return known or any(takes_first_token(each) or picks_before_pooler(each) for each in model.modules())
