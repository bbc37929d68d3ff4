"""The loss of a Hugging Face model: the batch's own shifted labels, and the mean over all ranks' tokens."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor

from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.rewrite.hugging_face.encoders.encoder_decoder import is_encoder_decoder
from lightning_sp.rewrite.hugging_face.generation import delete_attribute

# Those whose labels are of the tokens, or rows, that they stand at. Heads of rows are given whole sequences (`heads`).
_SHIFTED = "ForCausalLMLoss"
UNSHIFTED = ("ForMaskedLMLoss", "ForTokenClassification", "ForSequenceClassificationLoss", "ForQuestionAnsweringLoss")


def wrap_loss(model: Any, context: SequenceContext, undo: ExitStack) -> None:
    """Give the model's own loss function the labels that were shifted on the whole sequence; `undo` takes that back."""
    if "loss_function" not in dir(type(model)):
        return
    original = model.loss_function

    def loss_function(*args: Any, **kwargs: Any) -> Tensor:
        if context.step is not None:
            name = getattr(original, "__name__", str(original))
            # A decoder's targets as they are, for its input was shifted instead (Moonshine).
            given = is_encoder_decoder(model) and isinstance(kwargs.get("shift_labels"), Tensor)
            if name in UNSHIFTED or (name == _SHIFTED and given):
                own: Tensor = original(*args, **kwargs)
                return own
            if name != _SHIFTED or is_encoder_decoder(model):
                raise SequenceParallelError(
                    f"{type(model).__name__} computes {name}: only ForCausalLMLoss, whose labels are shifted, and {', '.join(UNSHIFTED)}, whose "
                    "are not, are known to be exact on shards; compute the loss in training_step, from the logits by lightning_sp.reductions"
                )
            if context.step.batch.encoder is not None:
                raise SequenceParallelError(
                    f"{type(model).__name__} computes {name}, whose targets are the next tokens, in an encoder-decoder batch, whose labels are "
                    "those of the decoder's own positions: compute its loss in training_step from the logits"
                )
            if context.step.batch.shift_labels is None:
                raise SequenceParallelError(
                    "the model computes its loss, but the batch has no 'labels' or 'shift_labels' that were sharded: name the batch's targets "
                    "so, or compute the loss in training_step from the logits"
                )
            # Shifting a shard would lose the target at its edge: these were shifted on the whole sequence.
            kwargs["shift_labels"] = context.step.batch.shift_labels
        loss: Tensor = original(*args, **kwargs)
        return loss

    had_own = "_loss_function" in vars(model)
    model.loss_function = loss_function
    undo.callback(setattr, model, "_loss_function", original) if had_own else undo.callback(
        delete_attribute, model, "_loss_function"
    )
