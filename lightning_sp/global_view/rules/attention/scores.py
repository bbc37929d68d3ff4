"""Attention that a model writes out: queries times keys, scaled, masked, biased, through a softmax, times values.

Nothing is computed until the values come: what happens to the scores is noted, and then it is one attention of the operator. No tensor of
S x S of the sequence's is made. What else a model does to scores is refused by name.

    q @ k.mT -> Scores -> scaled, masked, biased -> softmax -> Scores of weights -> dropout -> @ v -> a tensor of the sequence
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_sp.global_view.calls.call import NO_RULE, Call, Rule, is_plain, is_sequence, named
from lightning_sp.global_view.exchange.movement import brought, in_order
from lightning_sp.global_view.rules.attention.written_attention import (
    HIDDEN_BELOW,
    STILL_HIDDEN_BELOW,
    Attention,
    Scores,
    check_ties,
    four_dims,
    masks_of,
    refusal,
)
from lightning_sp.global_view.tensors.placement import broadcast, part_of
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor, whole_of


def scores_of(queries: SequenceTensor, keys: SequenceTensor) -> Any:
    """Return the scores of queries (..., S, D) and keys (..., D, T)."""
    own, other = queries.placement, keys.placement
    if own.outer * own.inner * other.outer * other.inner > 1 or queries.dim() < 2 or keys.dim() < 2:
        return NO_RULE
    queries, keys = in_order(queries), in_order(keys)
    own, other = queries.placement, keys.placement
    lead = broadcast(queries.shape[:-2], keys.shape[:-2])
    q = queries.local.expand(*lead, *queries.local.shape[-2:])
    k = keys.local.transpose(-2, -1)
    k = k.expand(*lead, *k.shape[-2:])
    attention = Attention(queries=q, keys=k, of_queries=own, of_keys=other.at(k.dim() - 2), lead=tuple(lead))
    return Scores(attention, lead, _product_dtype(queries, keys))


def _product_dtype(a: Tensor, b: Tensor) -> torch.dtype:
    """Return the dtype of a product of tensors. A model asks its scores for the lowest number that they hold."""
    return _autocast_dtype(torch.matmul, a, b) or torch.promote_types(a.dtype, b.dtype)


def _autocast_dtype(function: Callable[..., Tensor], *given: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast has a function give; None where it is off. What it casts is not the same on each kind of device."""
    if not torch.is_autocast_enabled(given[0].device.type):
        return None
    return function(*(torch.empty(1, 1, dtype=each.dtype, device=each.device) for each in given)).dtype


def times_values(weights: Scores, values: Any) -> Any:
    """Return the attention's output, a tensor of the sequence."""
    known = weights.attention
    if weights.is_stale:
        raise refusal("a write into a view")
    if not is_sequence(values) or values.placement.dim != values.dim() - 2:
        raise refusal("a product with what is no tokens of the sequence")
    if not known.is_weights or known.shows_sinks or known.is_averaged:
        raise refusal("a product with values before a softmax, of a mean of heads, or with sinks,")
    values = brought(values, known.of_keys.storage)
    if not values.placement.same_tokens(known.of_keys):
        raise refusal("a product with other tokens than those of the keys")
    if known.used:
        raise refusal("a second product of weights that were dropped")
    lead = known.lead
    if values.dim() > len(weights.lead) + 2:
        raise refusal("a product with values of more dims")
    if known.dropout:
        known.used.append("values")
    masks = masks_of(known)
    if masks.alike is not None and known.sinks is not None:
        raise refusal("a mask of all keys of a query, beside sinks,")
    four = lead if len(lead) == 2 else (1, math.prod(lead))
    local = values.local.expand(*weights.lead, *values.local.shape[-2:])

    def heads(x: Tensor) -> Tensor:
        return x.reshape(*four, *x.shape[-2:])

    out = known.of_queries.storage.attend(
        heads(known.queries),
        heads(known.keys),
        heads(local).to(known.queries.dtype),
        queries=known.of_queries,
        keys=known.of_keys,
        visible=four_dims(masks.visible, lead),
        bias=four_dims(masks.bias, lead),
        scale=known.scale if known.softcap is None else known.scale * known.softcap,
        softcap=known.softcap,
        dropout=known.dropout,
        sinks=known.sinks,
    )
    out = out.reshape(*weights.lead, *out.shape[-2:]).to(_product_dtype(weights, values))
    # What the operator gave is saved for its backward, and one device's product may be written into.
    out = out.clone()
    place = known.of_queries.at(out.dim() - 2)
    if masks.alike is not None:
        alike = masks.alike.expand(*lead, *masks.alike.shape[-2:]).reshape(*weights.lead, *masks.alike.shape[-2:])
        mean = values.mean(-2, keepdim=True)
        out = torch.where(part_of(alike, place), mean, out)
    return SequenceTensor(out, place)


def _number(value: Any) -> float | None:
    """Return a number that is known without a gradient."""
    if isinstance(value, (int, float)):
        return float(value)
    if is_plain(value) and value.numel() == 1 and not value.requires_grad:
        return float(value)
    return None


def scaled(call: Call) -> Any:
    """Multiply or divide by a number."""
    x, other = call.args[:2]
    x, other = (x, other) if isinstance(x, Scores) else (other, x)
    number = _number(other)
    if call.args[0] is not x and "div" in call.name:
        raise refusal("division by scores")
    known = x.attention
    may_hide = number is None and "div" not in call.name and known.factor is None and not known.is_weights
    if may_hide and _is_of_zeros_and_ones(other):
        return _result(call, x, x.changed(factor=_relead(other, x.lead, x.attention.lead)))
    if number is None or (number <= 0) or x.attention.is_weights or (call.name.startswith("r") and "div" in call.name):
        raise refusal(f"{call.name} by {'a tensor' if number is None else number}")
    factor = 1 / number if "div" in call.name else number
    known = x.attention
    if known.softcap is not None:
        if known.bias is not None or known.lowered is not None:
            raise refusal(f"{call.name} of what was added to capped scores")
        return _result(call, x, x.changed(softcap=known.softcap * factor))
    if known.lowered is not None and known.lowest * factor > STILL_HIDDEN_BELOW:
        raise refusal(f"{call.name} by {number} behind a mask, whose number becomes {known.lowest * factor:g}")
    bias = None if known.bias is None else known.bias * factor
    return _result(call, x, x.changed(scale=known.scale * factor, bias=bias, lowest=known.lowest * factor))


def _is_of_zeros_and_ones(value: Any) -> bool:
    return is_plain(value) and not value.requires_grad and bool(((value == 0) | (value == 1)).all())


def capped(call: Call) -> Any:
    """Take the tanh of scaled scores: with a factor behind it the softcap of Gemma 2."""
    x = call.args[0]
    known = x.attention
    hidden = known.lowered is not None or known.visible is not None
    if known.softcap is not None or known.bias is not None or hidden or known.is_shifted:
        raise refusal("tanh of what was added to the scores, or twice,")
    return _result(call, x, x.changed(softcap=1.0))


def _result(call: Call, x: Scores, new: Scores) -> Scores:
    if (call.function.__name__.endswith("_") and not call.function.__name__.startswith("__")) or call.name in (
        "iadd",
        "imul",
        "itruediv",
        "isub",
    ):
        x.attention = new.attention
        base = x.base
        while base is not None:
            base.is_old, base = True, base.base
        return x
    return new


def biased(call: Call) -> Any:
    """Add a bias that is whole, or subtract it."""
    x, other = call.args[:2]
    x, other = (x, other) if isinstance(x, Scores) else (other, x)
    number = _number(other)
    if call.args[0] is not x and "sub" in call.name:
        raise refusal("a difference that scores are taken from")
    if number == 0.0:
        return _result(call, x, x.changed())
    if (
        isinstance(other, Scores)
        or not isinstance(other, Tensor)
        or x.attention.is_weights
        or set(call.kwargs) - {"alpha"}
    ):
        raise refusal(f"{call.name} of {type(other).__name__}")
    if "alpha" in call.kwargs or (call.name != "add" and call.name != "radd" and call.name != "iadd"):
        if call.name not in ("sub", "isub", "subtract"):
            raise refusal(call.name)
        other = -other
    return _result(call, x, _with_bias(x, whole_of(other)))


def _with_bias(x: Scores, bias: Tensor) -> Scores:
    known = x.attention
    bias = _relead(bias, x.lead, known.lead)
    if known.factor is not None:
        # score * b + low * (1 - b), as GPT-1 hides keys.
        hides = (known.factor == 0).expand(torch.broadcast_shapes(bias.shape, known.factor.shape))  # type: ignore[no-untyped-call]
        low = bias.expand(hides.shape)[hides]
        if low.numel() and (
            float(low.detach().max()) > HIDDEN_BELOW or float(low.detach().min()) != float(low.detach().max())
        ):
            raise refusal("a product with zeros that no sum of one low number hides")
        bias = bias.masked_fill(hides, 0.0)
        x = _lowered(x.changed(factor=None), hides, float(low.max()) if low.numel() else 0.0)
        known = x.attention
    return x.changed(bias=bias if known.bias is None else known.bias + bias)


def _relead(whole: Tensor, shown: tuple[int, ...], lead: tuple[int, ...]) -> Tensor:
    """Return what is broadcastable to (*shown, S, T) as broadcastable to (*lead, S, T)."""
    if shown == lead or whole.dim() <= 2:
        return whole
    own = whole.shape[:-2]
    if math.prod(own) == 1:
        return whole.reshape(*whole.shape[-2:])
    return whole.expand(*shown, *whole.shape[-2:]).reshape(*lead, *whole.shape[-2:])


def _hidden(x: Scores, hidden: Any, value: Any) -> Scores:
    number = _number(value)
    known = x.attention
    if number is None or number > HIDDEN_BELOW or known.is_weights:
        raise refusal(f"a mask that puts {'a tensor' if number is None else number}")
    hides = _relead(whole_of(hidden).bool(), x.lead, known.lead)
    if number != -math.inf:
        return _lowered(x, hides, number)
    return x.changed(visible=~hides if known.visible is None else known.visible & ~hides)


def _lowered(x: Scores, hides: Tensor, number: float) -> Scores:
    known = x.attention
    # It stands in the place of what was added before, and what comes later is added to it.
    bias = None if known.bias is None else torch.where(hides, known.bias.new_zeros(()), known.bias)
    if known.lowered is None:
        return x.changed(lowered=hides, lowest=number, bias=bias)
    return x.changed(lowered=known.lowered | hides, lowest=max(known.lowest, number), bias=bias)


def at_least(call: Call) -> Any:
    """Raise scores to a number that is lower than any: what a sum with a mask has put below it, where it is the lowest of a dtype."""
    x, other = call.args[0], call.argument(1, "other", call.kwargs.get("min"))
    x, other = (x, other) if isinstance(x, Scores) else (other, x)  # torch.maximum(low, scores)
    number = _number(other)
    if number is None or number > HIDDEN_BELOW or len(call.args) + len(call.kwargs) > 2:
        raise refusal(call.name)
    check_ties(x.attention)
    return _result(call, x, x)


def masked(call: Call) -> Any:
    """Hide keys: `masked_fill`, or `where`."""
    if call.name == "masked_fill":
        x, hidden, value = (call.argument(i, name) for i, name in enumerate(("input", "mask", "value")))
        return _result(call, x, _hidden(x, hidden, value))
    condition, first, second = (call.argument(i, name) for i, name in enumerate(("condition", "input", "other")))
    if isinstance(call.args[0], Scores):  # x.where(condition, other)
        condition, first, second = call.args[1], call.args[0], call.args[2]
    if isinstance(first, Scores):
        return _hidden(first, ~whole_of(condition).bool(), second)
    return _hidden(second, condition, first)


def softmax(call: Call) -> Any:
    """Take the softmax over the keys."""
    x, dim = call.args[0], call.argument(1, "dim", -1)
    if dim is None or dim % x.dim() != x.dim() - 1 or x.attention.is_weights or call.name != "softmax":
        raise refusal(f"{call.name} along dim {dim}")
    if x.attention.factor is not None:
        raise refusal("a product with zeros that no sum of one low number hides")
    dtype = call.kwargs.get("dtype") or next((each for each in call.args[2:] if isinstance(each, torch.dtype)), None)
    shown = dtype or _autocast_dtype(partial(torch.softmax, dim=-1), x) or x.dtype
    return Scores(replace(x.attention, is_weights=True), x.lead, shown)


def dropped(call: Call) -> Any:
    """Drop weights."""
    x, p, training = call.args[0], call.argument(1, "p", 0.5), call.argument(2, "training", True)
    if not training or p == 0.0:
        return x
    if not x.attention.is_weights or x.attention.dropout:
        raise refusal("dropout before the softmax, or twice,")
    return x.changed(dropout=float(p), used=[])


def cast(call: Call) -> Any:
    """Show another dtype; the operator computes in its own. A mask may take that of scores."""
    x = call.args[0]
    if not isinstance(x, Scores):
        like = next(each for each in (*call.args, *call.kwargs.values()) if isinstance(each, Scores))
        return x.to(like.dtype)
    given = (*call.args[1:], *call.kwargs.values())
    names = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
    dtype = names.get(call.name) or next(
        (each.dtype if isinstance(each, Tensor) else each for each in given if isinstance(each, (torch.dtype, Tensor))),
        None,
    )
    return Scores(x.attention, x.lead, dtype or x.dtype)


def same(call: Call) -> Any:
    """Leave as it is."""
    return call.args[0]


def cloned(call: Call) -> Any:
    """Copy it: what is done to one in place is not done to the other."""
    return call.args[0].changed()


def expanded_as(call: Call) -> Any:
    """Show a whole mask in the shape of scores: as it is, for what is done with both broadcasts it."""
    x, other = call.args
    if isinstance(x, Scores) or not isinstance(other, Scores):
        raise refusal("expand_as")
    return whole_of(x)


def view(call: Call) -> Any:
    """Join or split the dims before queries and keys."""
    x, *shape = call.args
    given = list(shape[0] if shape and not isinstance(shape[0], int) else shape)
    if call.name == "unsqueeze":
        given = list(x.shape)
        given.insert(shape[0] % (x.dim() + 1), 1)
    if call.name == "flatten":
        start, end = call.argument(1, "start_dim", 0), call.argument(2, "end_dim", -1) % x.dim()
        given = [*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :]]
    if -1 in given:
        known_size = math.prod(size for size in given if size != -1)
        given[given.index(-1)] = math.prod(x.shape) // max(1, known_size)
    if list(given[-2:]) != list(x.shape[-2:]):
        raise refusal(f"{call.name} to {tuple(given)}")
    lead = list(given[:-2])
    known = x.attention
    if len(lead) > len(known.lead):  # finer than before: what is noted goes along
        finer = tuple(lead)

        def split(whole: Tensor | None) -> Tensor | None:
            if whole is None or whole.dim() <= 2 or math.prod(whole.shape[:-2]) == 1:
                return None if whole is None else whole.reshape(*whole.shape[-2:])
            return whole.expand(*known.lead, *whole.shape[-2:]).reshape(*finer, *whole.shape[-2:])

        known = replace(
            known,
            queries=known.queries.reshape(*finer, *known.queries.shape[-2:]),
            keys=known.keys.reshape(*finer, *known.keys.shape[-2:]),
            of_queries=known.of_queries.at(len(finer)),
            of_keys=known.of_keys.at(len(finer)),
            lead=finer,
            visible=split(known.visible),
            bias=split(known.bias),
        )
    found = Scores(known, lead, x.dtype)
    found.base, found.of_base = x, x.attention
    return found


RULES: dict[str, Rule] = {
    **named("mul multiply rmul imul div divide true_divide truediv itruediv idiv", scaled),
    **named("add radd iadd sub subtract isub", biased),
    **named("tanh", capped),
    **named("masked_fill where", masked),
    **named("max maximum clamp clamp_min", at_least),
    **named("softmax log_softmax", softmax),
    **named("dropout", dropped),
    **named("to type type_as float double half bfloat16", cast),
    **named("contiguous", same),
    **named("clone", cloned),
    **named("expand_as", expanded_as),
    **named("view reshape flatten unsqueeze", view),
}


def on_scores(call: Call) -> Any:
    """Note what a function does to scores.

    Raises:
        SequenceParallelError: it is none of those that are carried.
    """
    rule = RULES.get(call.name)
    if any(isinstance(each, Scores) and each.is_stale for each in call.args):
        raise refusal("a write into a view")
    if rule is None or any(isinstance(each, Scores) and each.attention.is_averaged for each in call.args):
        raise refusal(call.name)
    return rule(call)
