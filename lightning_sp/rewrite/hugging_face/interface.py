"""Hugging Face models, through their attention interface, with a mask function of ours; nothing of the model is edited.

Each strategy registers its own pair of functions under its own name, bound to its context, and takes them back. A custom attention without
a registered mask function gets no mask at all, silently: ours receives every mask the model asks for. Windows, chunks and padding it hands
on as a value, and what it cannot carry it refuses by name. Positions are always handed in, the loss gets the labels that were shifted on the
whole sequence.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_sp.attention import AttentionMask
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.rewrite.dropout import attention_dropout
from lightning_sp.rewrite.explicit_mask import explicit_mask
from lightning_sp.rewrite.hugging_face.encoder_decoder import check_encoder_decoder, is_encoder_decoder
from lightning_sp.rewrite.hugging_face.generation import wrap_generate
from lightning_sp.rewrite.hugging_face.loss import wrap_loss
from lightning_sp.rewrite.hugging_face.masks import asked_mask
from lightning_sp.rewrite.hugging_face.models import check_model, hugging_face_models, own_class
from lightning_sp.rewrite.hugging_face.position_embeddings import positions_of_shards
from lightning_sp.rewrite.hugging_face.relative_bias import adds_zeros, bias_of_whole_sequences
from lightning_sp.rewrite.hugging_face.rotary import follow_all_positions
from lightning_sp.rewrite.reference import whole_attention
from lightning_sp.rewrite.sdpa import attend

_numbers = itertools.count()
# Added to the scores, in each model's eager attention.
_BIASES = ("position_bias", "attn_bias", "alibi")
_REFUSED_ARGUMENTS = (
    "sinks",
    "head_mask",
    "layer_head_mask",
    "cache",
)


class HuggingFaceRewrite(AbstractContextManager[None]):
    """Routes the attention, masks, positions and loss of a module's Hugging Face models through the context, until it exits.

    A class because it holds what it replaces until it is put back.
    """

    def __init__(self, context: SequenceContext, module: nn.Module) -> None:
        self.context = context
        self.models = hugging_face_models(module)
        self._undo = ExitStack()

    def __enter__(self) -> None:
        if not self.models:
            return
        # The interface refuses names with "sdpa", "flash", "flex" or "/".
        for model in self.models:
            check_model(model)
            previous = model.config._attn_implementation
            name = f"sequence_parallel_{next(_numbers)}"
            _register(name, self.context, previous, self._undo)
            model.set_attn_implementation(name)
            self._undo.callback(model.set_attn_implementation, previous)
            hook = model.register_forward_pre_hook(
                partial(_hand_in_positions, self.context), with_kwargs=True, prepend=True
            )
            self._undo.callback(hook.remove)
            wrap_loss(model, self.context, self._undo)
            wrap_generate(model, self.context, self._undo)
            follow_all_positions(model, self.context, self._undo)
            bias_of_whole_sequences(model, self.context, self._undo)
            if getattr(model.config, "is_encoder_decoder", False):
                positions_of_shards(model, self.context, self._undo)

    def __exit__(self, *_: object) -> None:
        self._undo.close()


def _register(name: str, context: SequenceContext, previous: str, undo: ExitStack) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: PLC0415
    from transformers.masking_utils import sdpa_mask  # noqa: PLC0415

    masks = AttentionMaskInterface()

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if context.reference is not None:
            own = ("s_aux", "softcap", *_BIASES)
            if kwargs.get("dropout") or any(kwargs.get(name) is not None for name in own):
                # Torch's function would drop these, silently, and draw dropout of its own.
                return _dense(context, module, *args, **kwargs)
            # In the precision of the operator: the eager softmax computes in float32 even in a float64 model.
            return sdpa_attention_forward(module, *args, **kwargs)
        eager = getattr(sys.modules[own_class(module).__module__], "eager_attention_forward", sdpa_attention_forward)
        return AttentionInterface().get_interface(previous, eager)(module, *args, **kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        return (sdpa_mask if context.reference is not None else masks[previous])(*args, **kwargs)

    AttentionInterface.register(name, partial(_attention, context, attention))
    AttentionMaskInterface.register(name, partial(asked_mask, context, mask))
    for interface in (AttentionInterface, AttentionMaskInterface):
        undo.callback(interface._global_mapping.pop, name, None)


def _attention(
    context: SequenceContext, original: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Any, scaling: float | None = None, dropout: float = 0.0, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """One layer's attention. Shapes: query (B, H, s, D), key and value (B, K, s, D) -> (B, s, H, D)."""
    if context.step is None:
        result: tuple[Tensor, None] = original(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return result
    kind = type(module).__name__
    queries, keys = context.sequences(query.shape[2], key.shape[2])
    bias = None
    if attention_mask is not None and not isinstance(attention_mask, AttentionMask):
        if not isinstance(attention_mask, Tensor):
            raise SequenceParallelError(
                f"{kind} built an attention mask {_shape(attention_mask)} of its own: it cannot be carried"
            )
        attention_mask, bias = explicit_mask(context, attention_mask, queries, keys, f"{kind}'s attention mask")
    for argument in _REFUSED_ARGUMENTS:
        if kwargs.get(argument) is not None:
            raise SequenceParallelError(
                f"{kind} uses {argument}: it cannot be carried yet; without it the model would be silently wrong"
            )
    for argument in _BIASES:
        if kwargs.get(argument) is not None and not (argument == "position_bias" and adds_zeros(module)):
            bias = _added(bias, _bias(context, kwargs[argument], queries, keys, f"{kind}'s {argument}"))
    window = kwargs.get("sliding_window")
    if attention_mask is None and window is not None and keys.padded_length > int(window):
        raise SequenceParallelError(
            f"{kind} has a sliding window of {window} tokens and the sequence {keys.padded_length}, but the model asked for no "
            "mask with a window: which of the two this layer means is not known"
        )
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True)) if causal is None else bool(causal)
    asked = context.step.requested_causal
    if asked and causal not in asked:
        raise SequenceParallelError(
            f"{kind} says is_causal={causal}, but the model asked for {'causal' if True in asked else 'full'} masks: the two must agree"
        )
    mask = context.step.mask(queries, keys, causal) if attention_mask is None else attention_mask
    out = attend(
        context,
        query,
        key,
        value,
        mask=mask,
        scale=scaling,
        sinks=kwargs.get("s_aux"),
        softcap=kwargs.get("softcap"),
        bias=bias,
        dropout_p=dropout,
    )
    return out.transpose(1, 2), None


def _bias(context: SequenceContext, given: Any, queries: SequenceInfo, keys: SequenceInfo, what: str) -> Tensor | None:
    if isinstance(given, Tensor) and given.numel() == 1 and not given.requires_grad:
        return None  # one number for all scores changes no weight: see `relative_bias`
    found = explicit_mask(context, given, queries, keys, what)[1] if isinstance(given, Tensor) else None
    if found is None:
        raise SequenceParallelError(
            f"{what} {_shape(given)} is not floating point of the whole sequence: it cannot be carried; without it the model would be "
            "silently wrong"
        )
    return found


def _added(bias: Tensor | None, other: Tensor | None) -> Tensor | None:
    return bias if other is None else other if bias is None else bias + other


def _dense(
    context: SequenceContext, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None, s_aux: Tensor | None = None,
    softcap: float | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """One layer's attention on a short whole sequence, by its definition. Shapes: as in `_attention`."""
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    bias = None
    for name in _BIASES:
        bias = bias if others.get(name) is None else _added(bias, others[name])
    out = whole_attention(
        query, key, value, attention_mask, bias=bias, causal=causal and attention_mask is None, scale=scaling, sinks=s_aux, softcap=softcap,
        dropout=attention_dropout(context, dropout),
    )  # fmt: skip
    return out.transpose(1, 2), None


def _hand_in_positions(
    context: SequenceContext, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    batch = context.step.batch if context.step is not None else context.reference
    if batch is None:
        return None
    like = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
    named = {"position_ids": _read_sequence(context, batch, like)}
    if is_encoder_decoder(module):
        taken = inspect.signature(module.forward)
        check_encoder_decoder(module, batch, taken.bind_partial(*args, **kwargs).arguments)
        both = {"position_ids": batch.encoder or batch, "decoder_position_ids": batch}
        named = {name: sequence for name, sequence in both.items() if name in taken.parameters}
    for name, sequence in named.items():
        if kwargs.get(name) is None and sequence.position_ids is not None:
            kwargs[name] = sequence.position_ids if like is None else sequence.position_ids.to(like.device)
    # With a cache Hugging Face keeps every layer's keys and drops the documents of packed rows.
    kwargs["use_cache"] = False
    return args, kwargs


def _read_sequence(context: SequenceContext, batch: SequenceInfo, like: Tensor | None) -> SequenceInfo:
    """Return the sequence that a model of one is given: of a batch of two, the one of so many tokens."""
    for sequence in batch.sequences:
        tokens = sequence.length if context.step is None else context.local_tokens(sequence)
        if like is not None and like.dim() > 1 and like.shape[1] == tokens:
            return sequence
    return batch


def _shape(value: Any) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"({type(value).__name__})"
