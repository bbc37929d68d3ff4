"""Logits that are not made yet: a tensor of their shape, which knows the hidden states and the head.

    head(hidden) -> DeferredLogits -> .float(), / 30, tanh, view, [:, :-1]   recorded
                                   -> F.cross_entropy, logsumexp, argmax     over chunks of tokens
                                   -> anything else                          makes the logits, once, and goes on with them

Legend: B rows, s tokens of this rank, n tokens in all, E model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils._pytree import tree_map

from lightning_sp.loss.chunked_head import CrossEntropyOfTokens
from lightning_sp.loss.head_call import HeadCall, LaterHeadCall
from lightning_sp.loss.logits_functions import AGGREGATES, QUERIES, RECORDED, VIEWS, Cast, Recorded

# From the logits (c, V) of some tokens, and their rows of other tensors, to something for each of them.
OfRows = Callable[..., Tensor]
_GRAD_FN = vars(torch._C.TensorBase)["grad_fn"].__get__


class DeferredLogits(Tensor):
    """What an output head gives in a step: see `DeferredLogits.of`.

    Attributes:
        call: of the head.
        hidden: of its tokens, (..., E).
        functions: what was done to the logits since, each a function of tokens' logits (c, V).
        class_dim: which dim is the vocabulary: the last, or 1 of three (as F.cross_entropy takes it).
    """

    call: HeadCall
    hidden: Tensor
    functions: tuple[Recorded, ...]
    class_dim: int
    has_graph: bool
    _parent: tuple[DeferredLogits, Recorded] | None
    _made: Tensor | None

    @staticmethod
    def of(
        call: HeadCall,
        hidden: Tensor,
        *,
        functions: tuple[Recorded, ...] = (),
        dtype: torch.dtype | None = None,
        class_dim: int = -1,
        parent: tuple[DeferredLogits, Recorded] | None = None,
    ) -> DeferredLogits:
        """Return the logits of some hidden states. Shapes: (..., E) -> (..., V), or (B, V, s) with class_dim=1."""
        shape = [*hidden.shape[:-1]]
        shape.insert(len(shape) if class_dim == -1 else class_dim, len(call.weight))
        has_graph = call.requires_grad and torch.is_grad_enabled() and (parent is None or parent[0].has_graph)
        empty = Tensor._make_wrapper_subclass(DeferredLogits, shape, dtype=dtype or call.dtype, device=hidden.device)
        empty.call, empty.hidden, empty.functions, empty.class_dim = call, hidden, functions, class_dim
        empty.has_graph, empty._parent, empty._made = has_graph, parent, None
        if has_graph and not isinstance(call, LaterHeadCall):
            empty = _WithGraph.apply(hidden, *call.parameters, [empty])  # type: ignore[no-untyped-call]
        call.add(empty)
        return empty

    def make(self) -> Tensor:
        """Return the logits themselves, made once; a part of the tokens alone where the others' are not there."""
        if self._made is None:
            parent, self._parent = self._parent, None
            with torch.set_grad_enabled(self.has_graph):
                if parent is not None and (parent[0].is_made or parent[0].hidden.numel() == self.hidden.numel()):
                    self._made = parent[1](parent[0].make())
                else:
                    self._made = _finished(self.call.logits(self.hidden), self.functions, self.class_dim)
        return self._made

    @property
    def is_made(self) -> bool:
        """Whether the logits exist."""
        return self._made is not None

    def like(self, hidden: Tensor, take: Recorded, class_dim: int = -1) -> DeferredLogits:
        """Return the logits of some of the tokens, and how they are taken from all."""
        return DeferredLogits.of(
            self.call, hidden, functions=self.functions, dtype=self.dtype, class_dim=class_dim, parent=(self, take)
        )

    def then(self, function: Recorded, dtype: torch.dtype) -> DeferredLogits:
        """Return what a function makes of the logits of each token."""
        functions = (*self.functions, function)
        moved = self._vocabulary_last(function)
        return DeferredLogits.of(
            self.call, self.hidden, functions=functions, dtype=dtype, class_dim=self.class_dim, parent=(self, moved)
        )

    def _vocabulary_last(self, function: Recorded) -> Recorded:
        dim = self.class_dim
        return function if dim == -1 else lambda made: function(made.movedim(dim, -1)).movedim(-1, dim)

    def _hook(self, hook: Recorded) -> None:
        """Gather a unit of FSDP for the backward of what made the hidden states; what is made of these has weights of its own.

        It gathers at one moment of the backward, whatever a rank asks of its logits: ranks must agree on the order of their collectives.
        """
        if self.hidden.requires_grad:
            self.hidden.register_hook(hook)  # type: ignore[no-untyped-call]

    def summed(self, of_rows: OfRows, *others: Tensor) -> Tensor:
        """Return the sum over tokens of a function of their logits (c, V) and rows of other tensors (n, ...); in float32 or more."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.has_graph):
            return self.call.summed(self.hidden.flatten(0, -2), self._of_tokens(of_rows, others))

    def each_token(self, of_rows: OfRows, *others: Tensor) -> Tensor:
        """Return a function of each token's logits, as `summed`. Shapes: (n, ...)."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.has_graph):
            return self.call.each_token(self.hidden.flatten(0, -2), self._of_tokens(of_rows, others))

    def cross_entropy(self, targets: Tensor, ignore_index: int) -> Tensor | None:
        """Return the sum of the cross entropies of classes (n,), by formula; None where more was done than a cast to float32."""
        wide = torch.promote_types(self.dtype, torch.float32)
        casts = [each.dtype for each in self.functions if isinstance(each, Cast)]
        if self.dtype != wide or casts not in ([], [wide]) or len(casts) != len(self.functions):
            return None
        of_tokens = CrossEntropyOfTokens(targets=targets, ignore_index=ignore_index, dtype=wide)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.has_graph):
            return self.call.summed(self.hidden.flatten(0, -2), of_tokens)

    def _of_tokens(self, of_rows: OfRows, others: tuple[Tensor, ...]) -> Callable[[Tensor, int, int], Tensor]:
        def of_tokens(logits: Tensor, first: int, last: int) -> Tensor:
            for each in self.functions:
                logits = each(logits)
            return of_rows(logits, *(rows[first:last] for rows in others))

        return of_tokens

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record what is known, answer what the shape says, and make the logits for anything else."""
        kwargs = kwargs or {}
        own = args[0] if args and isinstance(args[0], DeferredLogits) else None
        if own is not None and not own.is_made:
            if function in QUERIES:
                with torch._C.DisableTorchFunctionSubclass():
                    return function(*args, **kwargs)
            if function is Tensor.register_hook and _is_of_fsdp(args[1]):
                return own._hook(args[1])
            if function == _GRAD_FN:
                return own.hidden.grad_fn
            for known in (VIEWS, RECORDED, AGGREGATES):
                found = known.get(function)
                result = NotImplemented if found is None else found(own, function, args, kwargs)
                if result is not NotImplemented:
                    return result
        elif own is not None and function is Tensor.register_hook and _is_of_fsdp(args[1]):
            return own._hook(args[1])
        made_args, made_kwargs = tree_map(make_logits, (args, kwargs))
        return function(*made_args, **made_kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make the logits where torch looks below its functions."""
        made_args, made_kwargs = tree_map(make_logits, (args, kwargs or {}))
        return function(*made_args, **made_kwargs)


class _WithGraph(torch.autograd.Function):
    """The graph of deferred logits that a function takes without asking torch for them: another autograd.Function."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, made: list[DeferredLogits]) -> Tensor:
        (empty,) = made  # in a list: a tensor that comes in and goes out would be a view of itself
        ctx.save_for_backward(hidden, weight, bias)
        ctx.call, ctx.functions, ctx.class_dim = empty.call, empty.functions, empty.class_dim
        return empty

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[:3]
        saved, whole = ctx.saved_tensors, ctx.call.whole()
        values = (saved[0].to(whole.weight.dtype), whole.weight, whole.bias)
        given: list[Any] = [
            None if each is None else each.detach().requires_grad_(need)
            for each, need in zip(values, needed, strict=True)
        ]
        with torch.enable_grad():
            logits = _finished(F.linear(*given), ctx.functions, ctx.class_dim)
        wanted = [each for each, need in zip(given, needed, strict=True) if need]
        found = iter(torch.autograd.grad(logits, wanted, gradient))
        return (*(next(found).to(saved[i].dtype) if need else None for i, need in enumerate(needed)), None)


def _finished(logits: Tensor, functions: tuple[Recorded, ...], class_dim: int) -> Tensor:
    """Return what was done to the logits of a head."""
    for each in functions:
        logits = each(logits)
    return logits if class_dim == -1 else logits.movedim(-1, class_dim)


def is_deferred(value: Any) -> bool:
    """Return whether a value is of this kind."""
    return isinstance(value, DeferredLogits)


def make_logits(value: Any) -> Any:
    """Return the logits for deferred ones, anything else as it is."""
    return value.make() if isinstance(value, DeferredLogits) else value


def _is_of_fsdp(hook: Any) -> bool:
    """Return whether a hook is that by which FSDP2 gathers a unit for its backward."""
    return isinstance(getattr(hook, "__self__", None), FSDPState)
