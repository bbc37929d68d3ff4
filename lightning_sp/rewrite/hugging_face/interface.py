"""Interception of Hugging Face models: their attention interface, with a mask function of ours; nothing of the model is edited.

Each strategy registers its own pair of functions under its own name, bound to its context, and takes them back. A custom attention without
a registered mask function gets no mask at all, silently: ours receives every mask the model asks for. The hooks and wrappers beside it hand
the model its positions, its shifted labels, its biases and rotary frequencies of the whole sequence.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from lightning_sp.context.step import SequenceContext
from lightning_sp.rewrite.hugging_face.attention import attention_forward
from lightning_sp.rewrite.hugging_face.encoders.encoder_decoder import is_encoder_decoder
from lightning_sp.rewrite.hugging_face.encoders.whole_encoder import run_encoder_whole
from lightning_sp.rewrite.hugging_face.heads import give_whole_sequences_to_heads
from lightning_sp.rewrite.hugging_face.layer_drop import skip_layers_alike
from lightning_sp.rewrite.hugging_face.losses.balance_loss import wrap_balance_loss
from lightning_sp.rewrite.hugging_face.losses.loss import wrap_loss
from lightning_sp.rewrite.hugging_face.losses.own_shift import replace_own_shift
from lightning_sp.rewrite.hugging_face.masks import requested_mask
from lightning_sp.rewrite.hugging_face.media.deepstack import give_features_of_own_tokens
from lightning_sp.rewrite.hugging_face.media.expansion import tell_placeholders_by_whole_sequence
from lightning_sp.rewrite.hugging_face.media.image_runs import number_runs_of_whole_sequence
from lightning_sp.rewrite.hugging_face.media.placement import count_placeholders_of_all_ranks, place_by_whole_sequence
from lightning_sp.rewrite.hugging_face.models import (
    hugging_face_models,
    own_class,
    reachable_models,
    why_unreachable,
)
from lightning_sp.rewrite.hugging_face.positions.base_models import pass_positions_to_base_models
from lightning_sp.rewrite.hugging_face.positions.composites import (
    count_of_text_model,
    counts_of_parts,
    pass_positions_to_parts,
)
from lightning_sp.rewrite.hugging_face.positions.cumulative_sum import intercept_cumulative_sums
from lightning_sp.rewrite.hugging_face.positions.position_count import PositionCount, PositionCounts, position_counts
from lightning_sp.rewrite.hugging_face.positions.position_embeddings import pass_positions_to_embeddings, sums_ids
from lightning_sp.rewrite.hugging_face.positions.position_ids import pass_position_ids
from lightning_sp.rewrite.hugging_face.positions.relative_bias import wrap_relative_bias
from lightning_sp.rewrite.hugging_face.positions.rope_index import count_on_whole_sequence
from lightning_sp.rewrite.hugging_face.positions.rotary import wrap_rotary
from lightning_sp.rewrite.hugging_face.positions.temperature import wrap_temperature
from lightning_sp.rewrite.hugging_face.virtual_tokens import place_virtual_tokens

_numbers = itertools.count()
# Of a model whose part is handed this rank's positions, or counts them.
_left_alone = PositionCount.BY_CUMSUM


class HuggingFaceRewrite(AbstractContextManager[None]):
    """Routes the attention, masks, positions and loss of a module's Hugging Face models through the context, until it exits."""

    def __init__(self, context: SequenceContext, module: nn.Module) -> None:
        self.context = context
        self.module = module
        models = hugging_face_models(module)
        # The others are run whole, or their first batch of sequences is refused.
        self.models = [model for model in models if not why_unreachable(model)]
        self._undo = ExitStack()

    def __enter__(self) -> None:
        for model in self.models:
            for part in reachable_models(model):
                _route_attention(part, self.context, self._undo)
            wrap_loss(model, self.context, self._undo)
            wrap_balance_loss(model, self.context, self._undo)
            give_whole_sequences_to_heads(model, self.context, self._undo)
            skip_layers_alike(model, self.context, self._undo)
            wrap_rotary(model, self.context, self._undo)
            wrap_temperature(model, self.context, self._undo)
            wrap_relative_bias(model, self.context, self._undo)
            count_on_whole_sequence(model, self.context, self._undo)
            number_runs_of_whole_sequence(model, self.context, self._undo)
            give_features_of_own_tokens(model, self.context, self._undo)
            run_encoder_whole(model, self.context, self._undo)
            replace_own_shift(model, self.context, self._undo)
        placing = (count_placeholders_of_all_ranks, tell_placeholders_by_whole_sequence)
        if any([each(model, self.context, self._undo) for model in self.models for each in placing]):
            place_by_whole_sequence(self.context, self._undo)
        place_virtual_tokens(self.module, self.context, self._undo)
        counts = [each for model in self.models for each in _intercept_positions(model, self.context, self._undo)]
        summed = [sums_ids(model) for model in self.models if is_encoder_decoder(model)]
        if any(PositionCount.BY_CUMSUM in each for each in counts) or any(summed):
            intercept_cumulative_sums(self.context, self._undo)

    def __exit__(self, *_: object) -> None:
        self._undo.close()


def _intercept_positions(model: Any, context: SequenceContext, undo: ExitStack) -> list[PositionCounts]:
    """Give a model the positions that it would count on the whole sequence; return how it counts, and its parts. `undo` takes that back."""
    by_order = PositionCounts(PositionCount.BY_ORDER, PositionCount.BY_ORDER)
    counts, parts = by_order if is_encoder_decoder(model) else position_counts(model), counts_of_parts(model)
    if not counts.were_seen and (parts := count_of_text_model(model)):
        counts = PositionCounts(_left_alone, _left_alone)
    by_embeddings = getattr(model.config, "is_encoder_decoder", False) or counts.of_ids is PositionCount.OWN_WAY
    if by_embeddings and pass_positions_to_embeddings(model, context, undo, parts):
        counts = counts.with_handed_embeddings
    hook = partial(pass_position_ids, context, counts)
    undo.callback(model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True).remove)
    pass_positions_to_base_models(model, context, undo)
    pass_positions_to_parts(parts, context, undo)
    return [counts, *parts.values()]


def _route_attention(model: Any, context: SequenceContext, undo: ExitStack) -> None:
    """Let a model's attention be ours under a name of its own; `undo` takes that back."""
    # The interface refuses names with "sdpa", "flash", "flex" or "/".
    previous, name = model.config._attn_implementation, f"sequence_parallel_{next(_numbers)}"
    _register(name, context, previous, undo)
    before = _attention_of_parts(model)
    set_attention(model, name)
    undo.callback(_set_attention_of_parts, before)
    # The preflight's reference is the model as the user made it.
    own = partial(_own_attention, before, _attention_of_parts(model))
    context.in_reference.append(own)
    undo.callback(context.in_reference.remove, own)


def set_attention(model: Any, name: str) -> None:
    """Let a model's attention be that of a name, in the parts that have a copy of its configuration too.

    transformers 5.17 leaves those out where the copy is of the same class: T5's stacks.
    """
    model.set_attn_implementation(name)
    for part in model.modules():
        own: Any = getattr(part, "config", None)
        is_copy = (
            hasattr(part, "set_attn_implementation") and own is not model.config and type(own) is type(model.config)
        )
        if is_copy and own._attn_implementation != name:
            part.set_attn_implementation(name)


def _attention_of_parts(model: Any) -> list[tuple[Any, Any]]:
    """Return each configuration within a model, with its attention's name: a backbone of convolutions has another, and refuses the whole's."""
    known: dict[int, Any] = {}
    asked = [part.config for part in model.modules() if hasattr(part, "config")]
    while asked:
        config = asked.pop()
        if id(config) not in known and hasattr(config, "_attn_implementation_internal"):
            known[id(config)] = config
            asked += [part for name in config.sub_configs if (part := getattr(config, name, None)) is not None]
    return [(each, each._attn_implementation_internal) for each in known.values()]


def _set_attention_of_parts(parts: list[tuple[Any, Any]]) -> None:
    for config, name in parts:
        config._attn_implementation_internal = name  # of this one alone, and unchecked: it was so


@contextmanager
def _own_attention(own: list[tuple[Any, Any]], ours: list[tuple[Any, Any]]) -> Iterator[None]:
    _set_attention_of_parts(own)
    flex: Any = getattr(sys.modules.get("transformers.integrations.flex_attention"), "WrappedFlexAttention", None)
    # Its one instance keeps the function that it was first called with: another strategy's, or torch's own, which has no backward on the CPU.
    before = getattr(flex, "_instance", None)
    if before is not None:
        flex._instance = None
    try:
        yield
    finally:
        _set_attention_of_parts(ours)
        if flex is not None:
            flex._instance = before


def _register(name: str, context: SequenceContext, previous: str, undo: ExitStack) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: PLC0415

    masks = AttentionMaskInterface()

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        eager = getattr(sys.modules[own_class(module).__module__], "eager_attention_forward", sdpa_attention_forward)
        return AttentionInterface().get_interface(previous, eager)(module, *args, **kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        return masks[previous](*args, **kwargs)

    AttentionInterface.register(name, partial(attention_forward, context, attention))
    AttentionMaskInterface.register(name, partial(requested_mask, context, mask, previous))
    for interface in (AttentionInterface, AttentionMaskInterface):
        undo.callback(interface._global_mapping.pop, name, None)
