"""Encoder-decoder models of Hugging Face: which they are, and their decoder's inputs, the labels shifted by one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import pad, shard
from lightning_sp.rewrite.hugging_face.models import own_class
from lightning_sp.rewrite.hugging_face.whole_sequence import whole_tokens


def is_encoder_decoder(model: Any) -> bool:
    """Return whether a Hugging Face model reads one sequence and writes another, and is not merely a part of one that does."""
    return (
        bool(getattr(model.config, "is_encoder_decoder", False))
        and "decoder_input_ids" in inspect.signature(model.forward).parameters
    )


# In the source of a forward that hides padding in the decoder's input that it made of labels.
_MAKES_MASK = "decoder_attention_mask = (decoder_input_ids != self.config.pad_token_id)"
# In that of a decoder that hides padding in its input, whoever made that (T5Gemma's).
_MASKS_PADDING = "attention_mask = make_default_2d_attention_mask(input_ids, inputs_embeds, self.config.pad_token_id)"
# Heads whose labels are of rows: their decoder reads the encoder's own tokens.
_OF_ROWS = ("ForSequenceClassification", "ForQuestionAnswering")


def source_of_decoder_inputs(models: list[Any]) -> str:
    """Return the batch's entry of which these models would make their decoder's input."""
    of_rows = [own_class(each).__name__.endswith(_OF_ROWS) for each in models]
    return "input_ids" if any(of_rows) else "labels"


def row_end(models: list[Any]) -> int | None:
    """Return the token by which these models classify rows: an encoder-decoder takes the state of the last one of each row."""
    classify = [each for each in models if is_encoder_decoder(each) and own_class(each).__name__.endswith(_OF_ROWS[0])]
    end = classify[0].config.eos_token_id if classify else None
    return end if isinstance(end, int) else None


def decoder_inputs(models: list[Any]) -> Callable[[Tensor], Tensor] | None:
    """Return the function from whole labels, or ids, to the decoder's input, as these models would.

    None where not all of them are encoder-decoders.

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
            f"the batch has labels or ids of shape {tuple(labels.shape)} and no decoder_input_ids: how {names} makes these of them is not "
            "known; put them into the batch, in the collate function, the labels shifted by one to the right behind the start token"
        )

    return refuse


def _shift_of(model: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the function with which a model makes its decoder's input of whole labels: its method, or its file's; None where neither is."""
    names = ("prepare_decoder_input_ids_from_labels", "_shift_right")  # the second of T5's heads
    method: Callable[[Tensor], Tensor] | None = next(
        (getattr(model, name) for name in names if hasattr(model, name)), None
    )
    if method is not None:
        return method
    shift = getattr(sys.modules[own_class(model).__module__], "shift_tokens_right", None)
    if shift is None:
        return None
    tokens = list(inspect.signature(shift).parameters)[1:]
    if not set(tokens) <= {"pad_token_id", "decoder_start_token_id"}:
        return None
    return partial(shift, **{name: getattr(model.config, name, None) for name in tokens})


def hidden_decoder_token(models: list[Any]) -> int | None:
    """Return the token that a model hides in the decoder's input, where it makes both of its labels; None where it hides none.

    `EncoderDecoderModel` does so with padding, which ignored labels become, wherever they stand, and so does T5Gemma's decoder.
    """
    return next(
        (token for each in models if is_encoder_decoder(each) and (token := _hidden_token(each)) is not None), None
    )


def _hidden_token(model: Any) -> int | None:
    """Return the token that a model, or its decoder, hides where it is given no mask of the decoder's input."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    for part, words in ((model, _MAKES_MASK), (decoder, _MASKS_PADDING)):
        if part is not None and words in _forward_of(part) and isinstance(token := part.config.pad_token_id, int):
            return token
    return None


def _forward_of(part: Any) -> str:
    """Return the source of a module's forward in one line, empty where there is none."""
    try:
        return " ".join(inspect.getsource(own_class(part).forward).split())  # type: ignore[attr-defined]
    except (OSError, TypeError):
        return ""


def made_decoder_inputs(context: SequenceContext, model: Any, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the decoder's inputs that a model would make of the labels or ids that it was given, on the whole sequence: this rank's part.

    Empty where it was given some, or where these are not of a sequence of the batch.

    Communicates: one all_gather of the labels.
    """
    assert context.step is not None
    batch, shift = context.step.batch, _shift_of(model)
    of_rows = own_class(model).__name__.endswith(_OF_ROWS)
    source, sequence = (given.get("input_ids"), batch.encoder) if of_rows else (given.get("labels"), batch)
    if shift is None or sequence is None or _has_decoder_inputs(given) or not isinstance(source, Tensor):
        return {}
    if source.shape != (sequence.rows, context.local_tokens(sequence)) or sequence.length != batch.length:
        return {}
    whole = shift(whole_tokens(context, sequence, source))
    made = {"decoder_input_ids": whole}
    if (hidden := _hidden_token(model)) is not None and given.get("decoder_attention_mask") is None:
        made["decoder_attention_mask"] = (whole != hidden).to(whole.dtype)
    rank, padding = context.mesh.sequence_rank, {"decoder_input_ids": 0, "decoder_attention_mask": 1}
    return {
        name: shard(pad(tensor, batch.padded_length, dim=1, value=padding[name]), batch.layout, rank, dim=1)
        for name, tensor in made.items()
    }


def _has_decoder_inputs(given: Mapping[str, Any]) -> bool:
    return any(given.get(f"decoder_{name}") is not None for name in ("input_ids", "inputs_embeds"))


def check_encoder_decoder(model: Any, batch: SequenceInfo, given: Mapping[str, Any]) -> None:
    """Refuse an encoder-decoder with a batch of one sequence, or without the batch's own decoder input."""
    if batch.encoder is None and not batch.encoder_is_whole:
        raise SequenceParallelError(
            f"{own_class(model).__name__} reads one sequence and writes another, and the batch holds one: give input_ids, or sounds or images, "
            "and labels or decoder_input_ids"
        )
    if not _has_decoder_inputs(given):
        # Shifted within a shard they would lose a token at each edge.
        raise SequenceParallelError(
            f"{own_class(model).__name__} got no decoder_input_ids, and would make them of this rank's part of the "
            f"{'input_ids' if given.get('labels') is None else 'labels'}: hand on the batch's, "
            "model(..., decoder_input_ids=batch['decoder_input_ids']), which are of the whole"
        )
    if batch.has_attention_mask and given.get("decoder_attention_mask") is None and _MAKES_MASK in _forward_of(model):
        raise SequenceParallelError(
            f"{own_class(model).__name__} got decoder_input_ids and no decoder_attention_mask: of labels alone it makes both, and hides what is "
            "ignored; hand on the batch's, model(..., decoder_attention_mask=batch['decoder_attention_mask'])"
        )
