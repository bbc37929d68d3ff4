"""One layer's attention of a Hugging Face model: its mask, biases, sinks and softcap go to the operator, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_sp.attention import AttentionMask
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext, Step
from lightning_sp.errors import SequenceParallelError
from lightning_sp.rewrite.attention_call import attend
from lightning_sp.rewrite.explicit_mask import explicit_mask
from lightning_sp.rewrite.hugging_face.positions.relative_bias import adds_zeros
from lightning_sp.rewrite.requested_mask import RequestedMask

# What models add to the scores in eager attention.
BIASES = ("position_bias", "attn_bias", "alibi")
_REFUSED_ARGUMENTS = ("sinks", "head_mask", "layer_head_mask", "cache", "indices")


def attention_forward(
    context: SequenceContext, original: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Any, scaling: float | None = None, dropout: float = 0.0, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Run one layer's attention, in the form of transformers' `AttentionInterface`; `original` outside of a step.

    Shapes: query (B, H, s, D), key and value (B, K, s, D) -> (B, s, H, D).
    """
    if context.leaves_alone(query.shape[2], key.shape[2]):
        result: tuple[Tensor, None] = original(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return result
    assert context.step is not None
    layer = type(module).__name__
    queries, keys = context.sequences(query.shape[2], key.shape[2])
    mask, bias = _given_mask(context, attention_mask, queries, keys, layer)
    _refuse_arguments(layer, kwargs)
    if isinstance(attention_mask, RequestedMask) and attention_mask.blind_targets and kwargs.get("s_aux") is None:
        raise SequenceParallelError(
            f"{layer}'s attention is eager, and a token of padding in front of a row has a target: it sees no key, and eager attention would "
            "attend to all tokens alike, the later ones too; set the label of each row's first token to -100 (its prediction from padding), "
            "pad on the right, or use attn_implementation='sdpa' where the model has it"
        )
    for name in BIASES:
        if kwargs.get(name) is not None and not (name == "position_bias" and adds_zeros(module)):
            bias = _sum(bias, _whole_bias(context, kwargs[name], queries, keys, f"{layer}'s {name}"))
    if mask is None:
        _check_window(layer, kwargs.get("sliding_window"), keys)
    if _stands_for_causality(module, attention_mask, kwargs.get("is_causal")):
        mask = attention_mask.mask
    else:
        causal = _is_causal(context.step, module, kwargs.get("is_causal"), crosses=keys is not queries)
        mask = context.step.mask(queries, keys, causal) if mask is None else mask
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


def _given_mask(
    context: SequenceContext, given: Any, queries: SequenceInfo, keys: SequenceInfo, layer: str
) -> tuple[AttentionMask | None, Tensor | None]:
    """Return the mask and the bias that a layer was given as its mask, None for neither."""
    if given is None or isinstance(given, RequestedMask):
        return None if given is None or given.says_nothing else given.mask, None
    if not isinstance(given, Tensor):
        raise SequenceParallelError(
            f"{layer} built an attention mask {_shape(given)} of its own, which is no tensor: it cannot be carried; give the layer a tensor of "
            "True and False or of summands, or set global_view=True, which shows the model whole sequences"
        )
    return explicit_mask(context, given, queries, keys, f"{layer}'s attention mask")


def _refuse_arguments(layer: str, given: Mapping[str, Any]) -> None:
    for name in _REFUSED_ARGUMENTS:
        if given.get(name) is not None:
            raise SequenceParallelError(
                f"{layer} uses {name}: it cannot be carried yet; without it the model would be silently wrong. Set global_view=True, whose "
                "rules carry more, or train the model without it"
            )


def _check_window(layer: str, window: Any, keys: SequenceInfo) -> None:
    if window is not None and keys.padded_length > int(window):
        raise SequenceParallelError(
            f"{layer} has a sliding window of {window} tokens and the sequence {keys.padded_length}, but the model asked for no "
            "mask with a window: which of the two this layer means is not known; let the model ask for create_sliding_window_causal_mask, or "
            "set sliding_window=None in its config"
        )


def _stands_for_causality(module: nn.Module, given: Any, is_causal: bool | None) -> bool:
    """Return whether a causal layer says that it is not, for it was given a mask, which is (Moonshine)."""
    return isinstance(given, RequestedMask) and is_causal is False and getattr(module, "is_causal", None) is True


def _is_causal(step: Step, module: nn.Module, given: bool | None, *, crosses: bool) -> bool:
    """Return whether a layer is causal by its argument or its attribute; the masks that the model asked for must say the same."""
    causal = bool(getattr(module, "is_causal", True)) if given is None else bool(given)
    requested = step.requested_causal
    # Attention to another sequence has no order, and may be given no mask.
    if requested and causal not in requested and not (crosses and not causal):
        raise SequenceParallelError(
            f"{type(module).__name__} says is_causal={causal}, but the model asked for {'causal' if True in requested else 'full'} masks: "
            "the two must agree"
        )
    return causal


def _whole_bias(
    context: SequenceContext, given: Any, queries: SequenceInfo, keys: SequenceInfo, what: str
) -> Tensor | None:
    if isinstance(given, Tensor) and given.numel() == 1 and not given.requires_grad:
        return None  # one number for all scores changes no weight: see `relative_bias`
    bias = explicit_mask(context, given, queries, keys, what)[1] if isinstance(given, Tensor) else None
    if bias is None:
        raise SequenceParallelError(
            f"{what} {_shape(given)} is not floating point of the whole sequence: it cannot be carried; without it the model would be "
            "silently wrong"
        )
    return bias


def _sum(bias: Tensor | None, other: Tensor | None) -> Tensor | None:
    return bias if other is None else other if bias is None else bias + other


def _shape(value: Any) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"({type(value).__name__})"
