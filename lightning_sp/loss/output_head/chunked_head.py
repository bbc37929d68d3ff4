"""An output head and a function of its logits, over chunks of tokens: no tensor of tokens x vocabulary exists.

    hidden (n, E) -> chunk (c, E) -> logits (c, V) -> one number for each token, or their sum
                       d_hidden  <-  d_logits      <-  autograd on the chunk alone

Of a sum the gradient is made in the forward, up to the factor that the backward brings: the head is multiplied three times in all, as with
logits. Of numbers for each token the backward makes the chunk anew: four times.

Of a head whose words are split over ranks V is this rank's: what looks at all words asks the others (`vocabulary_part.py`).

Legend: n tokens, c tokens of a chunk, E model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sp.context.own_gradients import gradients_of
from lightning_sp.devices import is_accelerator
from lightning_sp.errors import SequenceParallelError
from lightning_sp.weights.vocabulary_part import VocabularyPart

# From the logits (c, V) of tokens `first` to `last` to something for each of them, (c, ...).
OfTokens = Callable[[Tensor, int, int], Tensor]
# Of a chunk's logits in float32, and tokens that a product needs to be worth its call. For each chunk a device reads the head's weight and adds
# to its gradient, 6 GB and more of 128K words of 4,096: products of a thousand tokens hide most of that, those of 64 nothing.
CHUNK_BYTES, _ON_DEVICE, _MIN_TOKENS = 32 * 2**20, 512 * 2**20, 64
# Of a logit at the peak: as it was multiplied, as it is read in float32, and its gradient.
_BYTES_OF_LOGIT = 10


@dataclass(frozen=True, kw_only=True)
class CrossEntropyOfTokens:
    """The cross entropy of each token and one class; its gradient by formula, in the place of the logits.

    Args:
        targets: classes, (n,).
        ignore_index: the target that does not count.
        dtype: in which the logits are read.
        part: which words the logits are of; None for all.
    """

    targets: Tensor
    ignore_index: int
    dtype: torch.dtype
    part: VocabularyPart | None = None

    def __call__(self, logits: Tensor, first: int, last: int) -> Tensor:
        """Return each token's, 0 where it does not count. Shapes: (c, V) -> (c,)."""
        logits, targets = logits.to(self.dtype), self.targets[first:last]
        ignored = targets == self.ignore_index
        place = targets.masked_fill(ignored, 0).unsqueeze(-1)
        if self.part is not None:
            chosen, sums = self.part.chosen(logits, place), self.part.logsumexp(logits)
        else:
            chosen, sums = logits.gather(-1, place), logits.logsumexp(-1)
        return (sums - chosen.squeeze(-1)).masked_fill(ignored, 0)

    def with_gradient(self, logits: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return the sum over tokens and softmax(logits) - 1 at the target, each row 0 that does not count; overwrites the logits."""
        given, targets = logits.dtype, self.targets[first:last]
        ignored = (targets == self.ignore_index).unsqueeze(-1)
        logits = logits.to(self.dtype)
        place, counted = targets.unsqueeze(-1).masked_fill(ignored, 0), ~ignored
        if self.part is not None:
            place, is_here = self.part.places(place)
            counted = counted & is_here
        chosen, largest = logits.gather(-1, place).masked_fill(~counted, 0), logits.amax(-1, keepdim=True)
        if self.part is not None:
            largest = self.part.largest(largest)
        exponents = logits.sub_(largest).exp_()
        sums = exponents.sum(-1, keepdim=True)
        if self.part is not None:
            sums, chosen = self.part.sum(torch.stack([sums, chosen])).unbind()
        losses = (sums.log() + largest - chosen).masked_fill(ignored, 0)
        probabilities = exponents.mul_(sums.reciprocal().masked_fill(ignored, 0))
        probabilities.scatter_add_(-1, place, -counted.to(self.dtype))
        return _sum(losses), probabilities.to(given)


def auto_chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Return how many tokens' logits in float32 are about 32 MiB, 512 on a device that the host does not wait for; 64 at least."""
    return max(_MIN_TOKENS, (_ON_DEVICE if is_accelerator(device) else CHUNK_BYTES) // (4 * vocabulary))


def chunk_bytes(vocabulary: int, chunk_tokens: int | str | None, tokens: int, device: torch.device) -> int:
    """Return what the logits of a chunk are at their peak, in a step of some tokens; 0 where there are no chunks."""
    if not vocabulary or chunk_tokens is None:
        return 0
    most = auto_chunk_tokens(vocabulary, device) if chunk_tokens == "auto" else int(chunk_tokens)
    return _BYTES_OF_LOGIT * vocabulary * min(most, tokens)


@dataclass(frozen=True)
class Autocast:
    """The state of autocast on a device, to be had again elsewhere."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: str) -> Autocast:
        """Return the state in force."""
        return cls(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    def again(self) -> AbstractContextManager[Any]:
        """Have it in force."""
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled)

    def product_dtype(self, *factors: Tensor) -> torch.dtype:
        """Return the dtype in which a product of tensors is computed."""
        if self.enabled and all(each.dtype != torch.float64 for each in factors):
            return self.dtype
        return factors[0].dtype


@dataclass(frozen=True, kw_only=True)
class HeadWeights:
    """What a head multiplies with, whole, in the dtype of the product. Shapes: (V, E), (V,).

    Args:
        weight: of the head.
        bias: likewise; None where it has none.
        later: gives them in the backward, when FSDP may have freed these; None where the parameters are whole again then.
    """

    weight: Tensor
    bias: Tensor | None
    later: Callable[[], HeadWeights] | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return those of a chunk. Shapes: (c, E) -> (c, V)."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.to(self.weight.dtype), self.weight, self.bias)


def summed(
    hidden: Tensor,
    parameters: tuple[Tensor, Tensor | None],
    whole: HeadWeights,
    of_tokens: OfTokens,
    chunk_tokens: int,
) -> Tensor:
    """Return the sum over tokens of a function of their logits, in float32 or more.

    Args:
        hidden: what the head is given.
        parameters: weight and bias, which get the gradient. Their numbers are not read.
        whole: their numbers.
        of_tokens: gives one number for each token; autograd sees it.
        chunk_tokens: how many tokens' logits exist at a time.

    Shapes: (n, E), (V, E), (V,) -> ().
    """
    if not torch.is_grad_enabled():
        chunks = _chunks(len(hidden), chunk_tokens)
        return sum((_sum(of_tokens(whole.logits(hidden[a:b]), a, b)) for a, b in chunks), _zero(hidden))
    total: Tensor = _SumOverTokens.apply(hidden, *parameters, whole, of_tokens, chunk_tokens)  # type: ignore[no-untyped-call]
    return total


def each_token(
    hidden: Tensor,
    parameters: tuple[Tensor, Tensor | None],
    whole: HeadWeights,
    of_tokens: OfTokens,
    chunk_tokens: int,
) -> Tensor:
    """Return a function of each token's logits; its backward makes the logits of a chunk anew. As `summed`.

    Shapes: (n, E), (V, E), (V,) -> (n, ...).
    """
    if not torch.is_grad_enabled():
        return torch.cat([of_tokens(whole.logits(hidden[a:b]), a, b) for a, b in _chunks(len(hidden), chunk_tokens)])
    found: Tensor = _EachToken.apply(hidden, *parameters, whole, of_tokens, chunk_tokens)  # type: ignore[no-untyped-call]
    return found


class _SumOverTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        whole: HeadWeights,
        of_tokens: OfTokens,
        chunk_tokens: int,
    ) -> Tensor:
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        total = _zero(hidden)
        for first, last in _chunks(len(hidden), chunk_tokens):
            part, d_logits = _sum_and_gradient(of_tokens, whole.logits(hidden[first:last]), first, last)
            total = total + part
            gradients.add(d_logits, hidden[first:last], whole, first)
        # Saved, and not attributes: a checkpoint around this makes them anew in place of having them wait.
        ctx.save_for_backward(*gradients.wide())
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        once = not torch._C._autograd._get_current_graph_task_keep_graph()
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        scaled = (_scaled(each, upstream, in_place=once) for each in (d_hidden, d_weight, d_bias))
        return (*map(_cast, scaled, ctx.dtypes), None, None, None)


class _EachToken(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        whole: HeadWeights,
        of_tokens: OfTokens,
        chunk_tokens: int,
    ) -> Tensor:
        chunks = _chunks(len(hidden), chunk_tokens)
        found = torch.cat([of_tokens(whole.logits(hidden[a:b]), a, b) for a, b in chunks])
        ctx.save_for_backward(hidden, weight, bias)
        ctx.later = whole.later
        ctx.of_tokens, ctx.chunks, ctx.dtype = of_tokens, chunks, whole.weight.dtype
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.autocast = Autocast.now(hidden.device.type)
        if not found.is_floating_point():
            ctx.mark_non_differentiable(found)
        return found

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        hidden, weight, bias = ctx.saved_tensors
        whole = cast_weights(weight, bias, ctx.dtype) if ctx.later is None else ctx.later()
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        for first, last in ctx.chunks:
            logits = whole.logits(hidden[first:last]).requires_grad_()
            with torch.enable_grad(), ctx.autocast.again():
                found = ctx.of_tokens(logits, first, last)
            (d_logits,) = gradients_of(found, logits, upstream[first:last])
            del logits, found
            gradients.add(d_logits, hidden[first:last], whole, first)
        return (*map(_cast, gradients.wide(), ctx.dtypes), None, None, None)


class _Gradients:
    """The gradients of a head, chunk by chunk; a class because they add up in float32 or more, where there are any."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> None:
        self._hidden = torch.empty_like(hidden) if needed[0] else None
        shape, wide = weight.shape, torch.promote_types(weight.dtype, torch.float32)
        # Not zeros of the parameter's kind: it may be a shard whose numbers are elsewhere.
        self._weight = torch.zeros(shape, dtype=wide, device=hidden.device) if needed[1] else None
        self._bias = torch.zeros(shape[:1], dtype=wide, device=hidden.device) if needed[2] else None

    def add(self, d_logits: Tensor, hidden: Tensor, whole: HeadWeights, first: int) -> None:
        """Add a chunk's. Shapes: (c, V), (c, E)."""
        with torch.autocast(hidden.device.type, enabled=False):
            if self._hidden is not None:
                self._hidden[first : first + len(hidden)] = d_logits @ whole.weight
            if self._bias is not None:
                self._bias += d_logits.sum(0, dtype=self._bias.dtype)
            if self._weight is None:
                return
            if d_logits.device.type == "cpu" or d_logits.dtype == self._weight.dtype:
                # A bfloat16 product would be rounded, chunk by chunk.
                self._weight.addmm_(d_logits.to(self._weight.dtype).t(), hidden.to(self._weight.dtype))
            else:  # a GPU's product in float32 would take many times as long; chunks are long there, and rounded once each
                self._weight += d_logits.t() @ hidden.to(d_logits.dtype)

    def wide(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return those of hidden states, and of weight and bias in float32 or more."""
        return self._hidden, self._weight, self._bias


def cast_weights(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> HeadWeights:
    """Return weights without a graph, as a product of a dtype takes them."""
    return HeadWeights(weight=weight.detach().to(dtype), bias=None if bias is None else bias.detach().to(dtype))


def _chunks(num_tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """Return the first token of each chunk and the one after its last; one chunk where there is no token."""
    return [(a, min(a + chunk_tokens, num_tokens)) for a in range(0, max(num_tokens, 1), chunk_tokens)]


def _sum_and_gradient(of_tokens: OfTokens, logits: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Return the sum over a chunk's tokens and its gradient for their logits, which may be overwritten."""
    if isinstance(of_tokens, CrossEntropyOfTokens):
        return of_tokens.with_gradient(logits, first, last)
    logits.requires_grad_()
    with torch.enable_grad():
        part = _sum(of_tokens(logits, first, last))
    return part.detach(), gradients_of(part, logits)[0]


def _sum(each: Tensor) -> Tensor:
    return each.to(torch.promote_types(each.dtype, torch.float32)).sum()


def _zero(hidden: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)


def _cast(gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if gradient is None or dtype is None else gradient.to(dtype)


def _scaled(gradient: Tensor | None, upstream: Tensor, *, in_place: bool) -> Tensor | None:
    """Return a gradient times a number; a bfloat16 one in float32, a few rows at a time: rounded, the number would be off by 0.4%."""
    if gradient is None:
        return None
    scaled = gradient if in_place else torch.empty_like(gradient)
    wide = torch.promote_types(gradient.dtype, torch.float32)
    if gradient.dtype == wide:
        return torch.mul(gradient, upstream.to(wide), out=scaled)
    rows = max(1, 2**22 // max(1, gradient[:1].numel()))
    for first in range(0, len(gradient), rows):
        scaled[first : first + rows] = gradient[first : first + rows].to(wide) * upstream
    return scaled


def refuse_second_order() -> None:
    """Refuse a backward whose gradients are to have a graph."""
    if torch.is_grad_enabled():
        raise SequenceParallelError(
            "a backward with create_graph=True through a cross entropy whose logits were never made: its gradient was computed in the forward, "
            "without a graph of its own; loss_chunk_tokens=None makes the logits, at tokens x vocabulary x 12 bytes"
        )
