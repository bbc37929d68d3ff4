"""The loss of a Hugging Face model: labels that are shifted on the whole sequence, and the mean over all ranks' tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.rewrite.hugging_face.encoders.encoder_decoder import is_encoder_decoder
from lightning_sp.rewrite.hugging_face.generation import delete_attribute
from lightning_sp.rewrite.hugging_face.losses.given_labels import given_shift, targets_of

# Those whose labels are of the tokens, or rows, that they stand at. Heads of rows are given whole sequences (`heads`).
_SHIFTED = "ForCausalLMLoss"
UNSHIFTED = ("ForMaskedLMLoss", "ForTokenClassification", "ForSequenceClassificationLoss", "ForQuestionAnsweringLoss")


def wrap_loss(model: Any, context: SequenceContext, undo: ExitStack) -> None:
    """Give the model's own loss function its labels shifted on the whole sequence; `undo` takes that back."""
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
            # Shifting a shard would lose the target at its edge.
            kwargs["shift_labels"] = _targets(context, inspect.signature(original).bind(*args, **kwargs).arguments)
        loss: Tensor = original(*args, **kwargs)
        return loss

    had_own = "_loss_function" in vars(model)
    model.loss_function = loss_function
    undo.callback(setattr, model, "_loss_function", original) if had_own else undo.callback(
        delete_attribute, model, "_loss_function"
    )


def _targets(context: SequenceContext, given: Mapping[str, Any]) -> Tensor | None:
    """Return the targets of this rank's tokens; None where the model shifts labels of whole sequences by itself."""
    shifted = given_shift(context, given.get("shift_labels"))
    if shifted is not None or context.mesh.layout.size == 1:
        return shifted
    return targets_of(context, given["labels"], given["logits"].device)
