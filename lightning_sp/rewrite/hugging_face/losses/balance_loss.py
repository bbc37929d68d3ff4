"""The balance loss of a Hugging Face mixture of experts: a product of two means over tokens, so over those of the whole batch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

from torch import Tensor

from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.reductions import gather_rows, unshard
from lightning_sp.rewrite.hugging_face.models import own_class

_NAME = "load_balancing_loss_func"


def wrap_balance_loss(model: Any, context: SequenceContext, undo: ExitStack) -> None:
    """Give the balance losses of a model's files the routers' logits of all tokens and rows; `undo` takes that back."""
    files = {own_class(module).__module__ for module in model.modules()}
    for holder in (vars(sys.modules[name]) for name in sorted(files) if name in sys.modules):
        original = holder.get(_NAME)
        # Others of this name take probabilities of one layer.
        if callable(original) and "gate_logits" in inspect.signature(original).parameters:
            holder[_NAME] = _over_ranks(original, context)
            undo.callback(partial(holder.__setitem__, _NAME, original))


def _over_ranks(original: Callable[..., Any], context: SequenceContext) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @wraps(original)
    def balance_loss(*args: Any, **kwargs: Any) -> Any:
        if context.loss_step is None:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        logits, mask = bound.arguments["gate_logits"], bound.arguments.get("attention_mask")
        if isinstance(logits, tuple):
            bound.arguments["gate_logits"] = tuple(_whole(each, context) for each in logits)
        if isinstance(mask, Tensor):
            bound.arguments["attention_mask"] = gather_rows(unshard(mask))
        return original(*bound.args, **bound.kwargs)

    return balance_loss


def _whole(logits: Tensor, context: SequenceContext) -> Tensor:
    """Return the logits of all tokens of the global batch. Shapes: (B * s, experts) or (B, s, experts) -> (all rows * S, experts)."""
    assert context.loss_step is not None
    batch = context.loss_step.batch
    rows, local = batch.rows, context.local_tokens(batch)
    if logits.numel() != rows * local * logits.shape[-1]:
        raise SequenceParallelError(
            f"a router's logits {tuple(logits.shape)} are not those of this rank's {rows} x {local} tokens: the balance loss over all tokens "
            "cannot be made of them; output_router_logits=False leaves it out, or compute it in training_step"
        )
    whole = gather_rows(unshard(logits.reshape(rows, local, -1)))
    return whole.flatten(0, 1) if logits.dim() == 2 else whole
