"""One call of an output head whose logits wait: what it was given, and how its weights are had when something asks for them.

FSDP frees a head's weights when the forward of its unit ends. Logits that are still asked for afterwards are made of a copy: no rank then waits
for another, so a step may look at logits on one rank alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_sp.errors import SequenceParallelError
from lightning_sp.loss.output_head.chunked_head import (
    Autocast,
    HeadWeights,
    OfTokens,
    auto_chunk_tokens,
    cast_weights,
    each_token,
    refuse_second_order,
    summed,
)
from lightning_sp.loss.output_head.part_functions import OfAllWords
from lightning_sp.weights.vocabulary_part import vocabulary_part


class HeadCall:
    """A head and the state of autocast at its call; a class because its weights may leave between the call and the loss.

    Where a head's words are split over ranks, each has the weights of its own. All of them ask for the same, at the same time.

    Args:
        head: the layer, while its weights are whole.
        hidden: what it was given, (..., E).
        chunk_tokens: how many tokens' logits exist at a time in a loss.
    """

    def __init__(self, head: nn.Linear, hidden: Tensor, chunk_tokens: int | str) -> None:
        self.weight, self.bias, self.part = head.weight, head.bias, vocabulary_part(head)
        self.autocast = Autocast.now(hidden.device.type)
        self.dtype = self.autocast.product_dtype(hidden, head.weight)
        self._chunk_tokens = None if chunk_tokens == "auto" else int(chunk_tokens)
        parameters = (hidden, *self.parameters)
        self.requires_grad = torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in parameters)
        self._versions = [(each, each._version) for each in (hidden,) if not each.is_inference()]
        self._kept: HeadWeights | None = None
        # Whether its logits were written to, or asked for their gradient; and whether a loss was computed without them.
        self.is_final = self.gave_loss = False
        self._logits: list[weakref.ref[Any]] = []

    def add(self, logits: Any) -> None:
        """Note deferred logits of this call."""
        self._logits.append(weakref.ref(logits))

    @property
    def num_words(self) -> int:
        """Of the vocabulary."""
        return len(self.weight) if self.part is None else self.part.total

    @property
    def is_held(self) -> bool:
        """Whether somebody holds logits of it."""
        return any(each() is not None for each in self._logits)

    def make_all(self) -> None:
        """Make those that somebody holds, and no others from now on: the weights will be others.

        Those of several ranks' words wait for whoever reads them: one rank alone may hold them.
        """
        if self.part is not None:
            if self.is_held:
                self.keep()
            return
        for each in self._logits:
            if (logits := each()) is not None:
                logits.make()
        self.is_final = True

    def share_memory(self) -> None:
        """Make those that somebody holds, views of others as views: one of them is about to be written to."""
        held = [logits for each in self._logits if (logits := each()) is not None]
        for logits in held:
            logits.make()  # copies, and what functions made, have the numbers of before
        for logits in held:
            logits.be_a_view()

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

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits. Shapes: (..., E) -> (..., V)."""
        self._check_unchanged()
        given = self._copied(hidden)
        if self.requires_grad and torch.is_grad_enabled():
            # Of tokens in a row: to a view that a Function makes nobody may write.
            made: Tensor = _Logits.apply(given.flatten(0, -2), *self.parameters, self)  # type: ignore[no-untyped-call]
            made = made.view(*hidden.shape[:-1], made.shape[-1])
        else:
            made = self.whole().logits(given)
        return made if self.part is None else self.part.gathered(made)

    def product(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the logits by other weights, as torch does. Shapes: (..., E) -> (..., V)."""
        own = F.linear(self._copied(hidden), weight, bias)
        return own if self.part is None else self.part.gathered(own)

    def _copied(self, hidden: Tensor) -> Tensor:
        return hidden if self.part is None else self.part.copied(hidden)

    def chunk_tokens(self, of_tokens: OfTokens, device: torch.device) -> int:
        """Return how many tokens' logits exist at a time for a function of them."""
        if self._chunk_tokens is not None:
            return self._chunk_tokens
        if self.part is None or isinstance(of_tokens, OfAllWords):
            return auto_chunk_tokens(self.num_words, device)
        return auto_chunk_tokens(self.part.words, device)

    def summed(self, hidden: Tensor, of_tokens: OfTokens) -> Tensor:
        """Return the sum of a function of each token's logits. Shapes: (n, E) -> ()."""
        return self._over_chunks(summed, hidden, of_tokens)

    def each_token(self, hidden: Tensor, of_tokens: OfTokens) -> Tensor:
        """Return a function of each token's logits. Shapes: (n, E) -> (n, ...)."""
        return self._over_chunks(each_token, hidden, of_tokens)

    def _over_chunks(self, compute: Callable[..., Tensor], hidden: Tensor, of_tokens: OfTokens) -> Tensor:
        self._check_unchanged()
        self.gave_loss |= torch.is_grad_enabled()
        chunk_tokens = self.chunk_tokens(of_tokens, hidden.device)
        return compute(self._copied(hidden), self.parameters, self.whole(), of_tokens, chunk_tokens)

    def whole(self) -> HeadWeights:
        """Return the weights, whole while the unit's forward runs or as they were copied at its end."""
        now = cast_weights(*self.parameters, self.dtype) if self._kept is None else self._kept
        return replace(now, later=self.whole)

    def _check_unchanged(self) -> None:
        if any(each._version != version for each, version in self._versions):
            raise SequenceParallelError(
                "the hidden states that an output head was given were changed in place before its logits were asked for: they are made of them "
                "when a loss or a metric reads them; write `hidden = hidden * 2`, not `hidden *= 2`, or loss_chunk_tokens=None"
            )


class LaterHeadCall(HeadCall):
    """A call that is made when something asks for the logits: its weights are whole in the head's own forward alone."""

    def __init__(self, head: nn.Linear, hidden: Tensor, chunk_tokens: int | str) -> None:
        super().__init__(head, hidden, chunk_tokens)
        self._head = head

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits. Shapes: (..., E) -> (..., V)."""
        made: Tensor = self._head(hidden)
        return made

    def _over_chunks(self, compute: Callable[..., Tensor], hidden: Tensor, of_tokens: OfTokens) -> Tensor:
        def forward(head: nn.Linear, given: Tensor) -> Tensor:
            parameters = head.weight, head.bias
            whole = cast_weights(*parameters, self.dtype)
            return compute(
                self._copied(given), parameters, whole, of_tokens, self.chunk_tokens(of_tokens, given.device)
            )

        before = vars(self._head).get("forward")
        self._head.forward = MethodType(forward, self._head)  # type: ignore[method-assign]
        try:
            made: Tensor = self._head(hidden)
        finally:
            del self._head.forward
            if before is not None:
                self._head.forward = before  # type: ignore[method-assign]
        return made


class LogitsReadError(Exception):
    """Somebody reads logits of which only what is done to them was to be noted."""


class UnreadCall(LaterHeadCall):
    """A call that is not made: of its logits what is done to them is noted."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Raise."""
        raise LogitsReadError

    def _over_chunks(self, compute: Callable[..., Tensor], hidden: Tensor, of_tokens: OfTokens) -> Tensor:
        raise LogitsReadError


class _Logits(torch.autograd.Function):
    """The linear layer; in the backward by a copy of its weights, if its unit's forward has ended since."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: HeadCall) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.call, ctx.dtype = call, weight.dtype
        return call.whole().logits(hidden)

    @staticmethod
    def backward(ctx: Any, d_logits: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        (hidden,), weight = ctx.saved_tensors, ctx.call.whole().weight
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        return (
            (d_logits @ weight).to(hidden.dtype) if needs_hidden else None,
            (d_logits.t() @ hidden.to(weight.dtype)).to(ctx.dtype) if needs_weight else None,
            d_logits.sum(0).to(ctx.dtype) if needs_bias else None,
            None,
        )
