"""The global `position_ids` handed to a Hugging Face model: left alone it would count each shard's tokens from 0."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext
from lightning_sp.rewrite.hugging_face.encoder_decoder import check_encoder_decoder, is_encoder_decoder


def pass_position_ids(
    context: SequenceContext, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Add the batch's own positions to a model's arguments, where the user gave none: a forward pre-hook.

    An encoder-decoder gets those of both sequences, under the names that its forward takes. A reference run gets the whole ones.
    """
    batch = context.step.batch if context.step is not None else context.reference
    if batch is None:
        return None
    like = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
    named = {"position_ids": _sequence_read(context, batch, like)}
    if is_encoder_decoder(module):
        signature = inspect.signature(module.forward)
        check_encoder_decoder(module, batch, signature.bind_partial(*args, **kwargs).arguments)
        both = {"position_ids": batch.encoder or batch, "decoder_position_ids": batch}
        named = {name: sequence for name, sequence in both.items() if name in signature.parameters}
    for name, sequence in named.items():
        if kwargs.get(name) is None and sequence.position_ids is not None:
            kwargs[name] = sequence.position_ids if like is None else sequence.position_ids.to(like.device)
    # With a cache Hugging Face keeps every layer's keys and drops the documents of packed rows.
    kwargs["use_cache"] = False
    return args, kwargs


def _sequence_read(context: SequenceContext, batch: SequenceInfo, like: Tensor | None) -> SequenceInfo:
    """Return the sequence that a model of one sequence reads: of a batch of two, the one with as many tokens as its input."""
    for sequence in batch.sequences:
        tokens = sequence.length if context.step is None else context.local_tokens(sequence)
        if like is not None and like.dim() > 1 and like.shape[1] == tokens:
            return sequence
    return batch
