"""Encoder-decoder models of Hugging Face: which they are, and their decoder's inputs, the labels shifted by one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.errors import SequenceParallelError
from lightning_sp.rewrite.hugging_face.models import own_class


def is_encoder_decoder(model: Any) -> bool:
    """Return whether a Hugging Face model reads one sequence and writes another, and is not merely a part of one that does."""
    return (
        bool(getattr(model.config, "is_encoder_decoder", False))
        and "decoder_input_ids" in inspect.signature(model.forward).parameters
    )


def decoder_inputs(models: list[Any]) -> Callable[[Tensor], Tensor] | None:
    """Return the function from whole labels to the decoder's input, as these models would; None where not all of them are encoder-decoders.

    Shapes: (B, S) -> (B, S).
    """
    encoder_decoders = [each for each in models if is_encoder_decoder(each)]
    if not encoder_decoders or len(encoder_decoders) < len(models):
        return None
    prepare = _shift_of(encoder_decoders[0])
    if prepare is not None and len(encoder_decoders) == 1:
        return prepare
    names = ", ".join(own_class(each).__name__ for each in encoder_decoders)

    def refuse(labels: Tensor) -> Tensor:
        raise SequenceParallelError(
            f"the batch has labels of shape {tuple(labels.shape)} and no decoder_input_ids: how {names} makes these of them is not known; put "
            "them into the batch, in the collate function, the labels shifted by one to the right behind the start token"
        )

    return refuse


def _shift_of(model: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the function with which a model makes its decoder's input of whole labels: its method, or its file's; None where neither is."""
    method: Callable[[Tensor], Tensor] | None = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if method is not None:
        return method
    shift = getattr(sys.modules[own_class(model).__module__], "shift_tokens_right", None)
    if shift is None:
        return None
    tokens = list(inspect.signature(shift).parameters)[1:]
    if not set(tokens) <= {"pad_token_id", "decoder_start_token_id"}:
        return None
    return partial(shift, **{name: getattr(model.config, name, None) for name in tokens})


def check_encoder_decoder(model: Any, batch: SequenceInfo, given: Mapping[str, Any]) -> None:
    """Refuse an encoder-decoder with a batch of one sequence, or without the batch's own decoder input."""
    if batch.encoder is None:
        raise SequenceParallelError(
            f"{own_class(model).__name__} reads one sequence and writes another, and the batch holds one: give input_ids and labels, or "
            "decoder_input_ids"
        )
    if all(given.get(f"decoder_{name}") is None for name in ("input_ids", "inputs_embeds")):
        # Shifted within a shard they would lose a token at each edge.
        raise SequenceParallelError(
            f"{own_class(model).__name__} got no decoder_input_ids, and would make them of this rank's part of the "
            f"{'input_ids' if given.get('labels') is None else 'labels'}: hand on the batch's, "
            "model(..., decoder_input_ids=batch['decoder_input_ids']), which are of the whole"
        )
