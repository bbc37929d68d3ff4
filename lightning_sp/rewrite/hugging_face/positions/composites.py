"""Encoder-decoders that are made of two models of one sequence each: ViT and GPT-2, wav2vec 2.0 and BERT, BERT twice.

    VisionEncoderDecoderModel(pixel_values, decoder_input_ids)     takes no positions
      -> GPT2LMHeadModel(input_ids, ...)                           would count from 0 on each rank

The whole names no `decoder_position_ids` in its forward. So each model of tokens within it is handed the positions that it counts alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from lightning_sp.context.step import SequenceContext
from lightning_sp.rewrite.hugging_face.encoders.encoder_decoder import is_encoder_decoder
from lightning_sp.rewrite.hugging_face.models import own_class
from lightning_sp.rewrite.hugging_face.positions.position_count import PositionCounts, position_counts
from lightning_sp.rewrite.hugging_face.positions.position_embeddings import is_handed_positions
from lightning_sp.rewrite.hugging_face.positions.position_ids import pass_position_ids


def counts_of_parts(model: Any) -> dict[nn.Module, PositionCounts]:
    """Return each model of tokens within an encoder-decoder that takes no positions for its decoder, with how it counts by itself.

    Empty for any other model. Such a part whose embeddings are handed positions counts by these. One that names no positions, of the whole's
    own file, is left out (T5's and BART's): `position_embeddings` and `relative_bias` know these, and an experiment takes time.
    """
    if not is_encoder_decoder(model) or "decoder_position_ids" in inspect.signature(model.forward).parameters:
        return {}
    found = {}
    for part in _parts(model):
        takes_positions = "position_ids" in inspect.signature(part.forward).parameters
        if not takes_positions and own_class(part).__module__ == own_class(model).__module__:
            continue
        counts = position_counts(part, by_name=True)
        if any(is_handed_positions(each) for each in part.modules()):
            counts = counts.with_handed_embeddings
        found[part] = counts
    return found


def count_of_text_model(model: Any) -> dict[nn.Module, PositionCounts]:
    """Return the model of tokens within one that takes pictures too, with how it counts by itself; empty where it shows nothing either.

    Args:
        model: fails on tokens alone (BLIP-2), so that how it counts was not seen. Positions by order, handed to it, would reach an OPT within,
            which counts by its mask.
    """
    embeddings = _input_embeddings(model)
    for part in _parts(model):
        if embeddings is not None and _input_embeddings(part) is embeddings:
            counts = position_counts(part, by_name=True)
            return {part: counts} if counts.were_seen else {}
    return {}


def _input_embeddings(model: Any) -> nn.Module | None:
    try:
        found: nn.Module = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return found


def pass_positions_to_parts(parts: dict[nn.Module, PositionCounts], context: SequenceContext, undo: ExitStack) -> None:
    """Hand each part the positions of its tokens, or refuse one that counts in a way of its own once it is called. `undo` takes that back."""
    for part, counts in parts.items():
        hook = partial(pass_position_ids, context, counts)
        undo.callback(part.register_forward_pre_hook(hook, with_kwargs=True, prepend=True).remove)


def _parts(module: nn.Module) -> Iterator[Any]:
    """Yield the outermost models of tokens within a module."""
    from transformers import PreTrainedModel  # noqa: PLC0415

    for child in module.children():
        is_model = isinstance(child, PreTrainedModel) and not is_encoder_decoder(child)
        if is_model and "input_ids" in inspect.signature(child.forward).parameters:
            yield child
        else:
            yield from _parts(child)
