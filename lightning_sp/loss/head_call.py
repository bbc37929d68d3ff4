"""One call of an output head whose logits wait: what it was given, and how its weights are had when something asks for them.

FSDP frees a head's weights when the forward of its unit ends. Logits that are still asked for afterwards are made of a copy: no rank then waits
for another, so a step may look at logits on one rank alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_sp.errors import SequenceParallelError
from lightning_sp.loss.chunked_head import (
    Autocast,
    HeadWeights,
    OfTokens,
    auto_chunk_tokens,
    cast_weights,
    each_token,
    summed,
)


class HeadCall:
    """A head and the state of autocast at its call; a class because its weights may leave between the call and the loss.

    Args:
        head: the layer, while its weights are whole.
        hidden: what it was given, (..., E).
        chunk_tokens: how many tokens' logits exist at a time in a loss.
    """

    def __init__(self, head: nn.Linear, hidden: Tensor, chunk_tokens: int | str) -> None:
        self.weight, self.bias = head.weight, head.bias
        self.autocast = Autocast.now(hidden.device.type)
        self.dtype = self.autocast.product_dtype(hidden, head.weight)
        self.chunk_tokens = auto_chunk_tokens(len(head.weight)) if chunk_tokens == "auto" else int(chunk_tokens)
        parameters = (hidden, *self.parameters)
        self.requires_grad = torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in parameters)
        self._versions = [(each, each._version) for each in (hidden,) if not each.is_inference()]
        self._kept: HeadWeights | None = None
        # FSDP's, of the outputs of units: they gather for the backward.
        self._hooks: list[Callable[[Tensor], Tensor]] = []
        self._logits: list[weakref.ref[Any]] = []

    def add(self, logits: Any) -> None:
        """Note deferred logits of this call."""
        self._logits.append(weakref.ref(logits))

    def make_all(self) -> None:
        """Make those that somebody holds."""
        for each in self._logits:
            if (logits := each()) is not None:
                logits.make()

    @property
    def parameters(self) -> tuple[Tensor, Tensor | None]:
        """What gets the gradient."""
        return self.weight, self.bias

    def keep(self) -> None:
        """Copy the weights, for those in use are about to be freed."""
        if self._kept is None:
            copied = [None if p is None else p.detach().to(self.dtype, copy=True) for p in self.parameters]
            assert copied[0] is not None
            self._kept = HeadWeights(weight=copied[0], bias=copied[1])

    def hook(self, hook: Callable[[Tensor], Tensor], *made: Tensor | None) -> None:
        """Call a hook of FSDP for the gradient of whatever is made of the logits."""
        self._hooks.append(hook)
        for each in made:
            if each is not None and each.requires_grad:
                each.register_hook(hook)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits. Shapes: (..., E) -> (..., V)."""
        self._check_unchanged()
        if self._kept is not None and torch.is_grad_enabled():
            return self._hooked(_Logits.apply(hidden, *self.parameters, self._kept))  # type: ignore[no-untyped-call]
        if self._kept is not None:
            return self._kept.logits(hidden)
        with self.autocast.again():
            return self._hooked(F.linear(hidden, self.weight, self.bias))

    def summed(self, hidden: Tensor, of_tokens: OfTokens) -> Tensor:
        """Return the sum of a function of each token's logits. Shapes: (n, E) -> ()."""
        self._check_unchanged()
        return self._hooked(summed(hidden, self.parameters, self._whole(), of_tokens, self.chunk_tokens))

    def each_token(self, hidden: Tensor, of_tokens: OfTokens) -> Tensor:
        """Return a function of each token's logits. Shapes: (n, E) -> (n, ...)."""
        self._check_unchanged()
        return self._hooked(each_token(hidden, self.parameters, self._whole(), of_tokens, self.chunk_tokens))

    def _whole(self) -> HeadWeights:
        return cast_weights(*self.parameters, self.dtype) if self._kept is None else self._kept

    def _hooked(self, made: Tensor) -> Tensor:
        if made.requires_grad:
            for each in self._hooks:
                made.register_hook(each)
        return made

    def _check_unchanged(self) -> None:
        if any(each._version != version for each, version in self._versions):
            raise SequenceParallelError(
                "the hidden states that an output head was given were changed in place before its logits were asked for: they are made of them "
                "when a loss or a metric reads them; write `hidden = hidden * 2`, not `hidden *= 2`, or loss_chunk_tokens=None"
            )


class _Logits(torch.autograd.Function):
    """The linear layer, by a copy of its weights in the forward; the parameters themselves are whole again in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, kept: HeadWeights) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.dtype = kept.weight.dtype
        return kept.logits(hidden)

    @staticmethod
    def backward(ctx: Any, d_logits: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        rows = d_logits.flatten(0, -2)
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        return (
            (d_logits @ weight.to(ctx.dtype)).to(hidden.dtype) if needs_hidden else None,
            (rows.t() @ hidden.flatten(0, -2).to(ctx.dtype)).to(weight.dtype) if needs_weight else None,
            rows.sum(0).to(weight.dtype) if needs_bias else None,
            None,
        )
