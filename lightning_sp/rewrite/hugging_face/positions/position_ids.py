"""The positions that a Hugging Face model would count on the whole batch: handed to it, counted by it over all ranks, or refused.

Left alone it would count each shard's tokens from 0. What the user hands to the model is left alone, and so is a run of the preflight's
reference, except for the documents that the user declared.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import positions
from lightning_sp.rewrite.hugging_face.encoders.encoder_decoder import (
    check_encoder_decoder,
    is_encoder_decoder,
    made_decoder_inputs,
)
from lightning_sp.rewrite.hugging_face.models import own_class
from lightning_sp.rewrite.hugging_face.positions.position_count import PositionCount, PositionCounts
from lightning_sp.rewrite.hugging_face.positions.rope_index import counts_in_rows


def pass_position_ids(
    context: SequenceContext, counts: PositionCounts, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Add the positions of this rank's tokens to a model's arguments, where the user gave none: a forward pre-hook.

    An encoder-decoder gets those of both sequences, under the names that its forward takes.

    Raises:
        SequenceParallelError: how the model counts its positions is not known, or documents were not declared.
    """
    if context.step is None:
        return _declared_documents(context.reference, module, args, kwargs)
    batch = context.step.batch
    context.step.has_batch_masks = _are_batch_masks(batch, [*args, *kwargs.values()])
    if counts_in_rows(module, kwargs) and _given_by_loader(batch, kwargs) is None:
        return args, {**kwargs, "position_ids": None, "use_cache": False}
    count = counts.of_ids if kwargs.get("inputs_embeds") is None else counts.of_embeddings
    like = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
    _check_documents(module, batch, args, kwargs)
    named = {"position_ids": _sequence_read(context, batch, like)}
    if count is PositionCount.FROM_ONE and "position_ids" in kwargs:
        kwargs["position_ids"] = _given_by_loader(batch, kwargs)
    if is_encoder_decoder(module):
        signature = inspect.signature(module.forward)
        # Sharding has made its inputs of the batch's labels, and the step may hand over others.
        made = batch.made_inputs
        others = {name: value for name, value in kwargs.items() if name not in made or value is not made[name]}
        if found := made_decoder_inputs(context, module, signature.bind_partial(*args, **others).arguments):
            kwargs = others | found
        check_encoder_decoder(module, batch, signature.bind_partial(*args, **kwargs).arguments)
        both = {"position_ids": batch.encoder or batch, "decoder_position_ids": batch}
        named = {name: sequence for name, sequence in both.items() if name in signature.parameters}
    elif count not in (PositionCount.BY_ORDER, PositionCount.FROM_ONE) and batch.boundaries is None:
        kwargs = _counted_by_itself(context, count, module, batch, kwargs)
        named = {}
    for name, sequence in named.items():
        if kwargs.get(name) is None and sequence.position_ids is not None:
            # The batch's own are of a user who hands them on; where they mean documents they are part of the declaration.
            own = sequence.position_ids if sequence.boundaries is not None else _by_order(context, sequence)
            own = own + 1 if count is PositionCount.FROM_ONE else own
            kwargs[name] = own if like is None else own.to(like.device)
    # With a cache Hugging Face keeps every layer's keys and drops the documents of packed rows. A head of an encoder-decoder that does not
    # name the option sets it itself (T5Gemma 2's for tokens).
    if "use_cache" in inspect.signature(module.forward).parameters or not getattr(
        module.config, "is_encoder_decoder", False
    ):
        kwargs["use_cache"] = False
    return args, kwargs


def _declared_documents(
    reference: SequenceInfo | None, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Let the model build the mask of declared documents by itself: the only thing that a reference run is handed."""
    if reference is None or reference.boundaries is None or is_encoder_decoder(module):
        return None
    if kwargs.get("position_ids") is None:
        kwargs["position_ids"] = reference.position_ids
    kwargs["use_cache"] = False
    return args, kwargs


def _check_documents(module: Any, batch: SequenceInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse documents by Hugging Face's convention alone where its model would attend across them on one device."""
    if batch.boundaries is None or batch.documents_declared:
        return
    given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    caches = given.get("use_cache")
    caches = getattr(module.config, "use_cache", False) if caches is None else caches
    caches = caches and not (module.training and getattr(module, "is_gradient_checkpointing", False))
    handed = given.get("position_ids", kwargs.get("position_ids")) is not None
    if caches or not handed:
        why = "use_cache=True, with which" if caches else "no position_ids, without which"
        raise SequenceParallelError(
            f"the batch's position_ids restart within {batch.rows} rows, and {own_class(module).__name__} is called with {why} it attends "
            "across documents on one device: pass packed_documents=True to keep attention within them, packed_documents=False to attend to the "
            "whole row, or call the model with position_ids and use_cache=False"
        )


def _by_order(context: SequenceContext, sequence: SequenceInfo) -> Tensor:
    """Return this rank's positions as one device counts them by the order of the tokens; our padding is counted anew."""
    assert sequence.position_ids is not None
    if not sequence.positions_given:
        return sequence.position_ids
    counted = positions(sequence.layout, sequence.padded_length, context.mesh.sequence_rank)
    return torch.where(counted < sequence.length, counted, counted - sequence.length).expand(sequence.rows, -1)


def _counted_by_itself(
    context: SequenceContext, count: PositionCount, module: nn.Module, batch: SequenceInfo, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Leave a model to its own count; positions of the batch that its loader did not give are ours, and would replace it."""
    given = _given_by_loader(batch, kwargs)
    if "position_ids" in kwargs:
        kwargs["position_ids"] = given
    if "position_ids" not in inspect.signature(module.forward).parameters:
        kwargs.pop("position_ids", None)
    if given is not None or context.mesh.layout.size == 1:
        return kwargs
    name = own_class(module).__name__
    if count is PositionCount.OWN_WAY:
        raise SequenceParallelError(
            f"{name} counts the positions of its {'tokens' if kwargs.get('inputs_embeds') is None else 'inputs_embeds'} in a way of its own, "
            f"of this rank's {context.local_tokens(batch)} of {batch.length} alone: hand it the position_ids that it would count on the whole "
            "batch, or use a model that counts by order, or from its ids or its mask"
        )
    return kwargs


def _are_batch_masks(batch: SequenceInfo, given: Sequence[Any]) -> bool:
    """Return whether a model is given the padding masks of all sequences of a batch, to which nobody has written since."""
    masks = [each.mask_in_batch for each in batch.sequences if each.mask_in_batch is not None]
    return all(any(each is mask for each in given) and mask._version == version for mask, version in masks)


def _given_by_loader(batch: SequenceInfo, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the positions that a model was handed, None where they are those that sharding adds to every batch."""
    given: Tensor | None = kwargs.get("position_ids")
    if given is None or batch.positions_given or batch.position_ids is None:
        return given
    ours = batch.position_ids.to(given.device)
    return None if given.shape == ours.shape and bool(torch.equal(given, ours)) else given


def _sequence_read(context: SequenceContext, batch: SequenceInfo, like: Tensor | None) -> SequenceInfo:
    """Return the sequence that a model of one sequence reads: of a batch of two, the one with as many tokens as its input."""
    for sequence in batch.sequences:
        if like is not None and like.dim() > 1 and like.shape[1] == context.local_tokens(sequence):
            return sequence
    return batch
