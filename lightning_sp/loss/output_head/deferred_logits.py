"""Logits that are not made yet: a tensor of their shape, which knows the hidden states and the head.

    head(hidden) -> DeferredLogits -> .float(), / 30, tanh, view, [:, :-1]   recorded
                                   -> F.cross_entropy, logsumexp, argmax     over chunks of tokens
                                   -> anything else                          makes the logits, once, and goes on with them

Legend: B rows, s tokens of this rank, n tokens in all, E model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils._pytree import tree_leaves, tree_map

from lightning_sp.context.own_gradients import gradients_of
from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.tensors.deferred import DeferredTensor
from lightning_sp.loss.output_head.chunked_head import CrossEntropyOfTokens
from lightning_sp.loss.output_head.head_call import HeadCall, LaterHeadCall, LogitsReadError, UnreadCall
from lightning_sp.loss.output_head.logits_functions import AGGREGATES, QUERIES, RECORDED, VIEWS, Cast, Recorded
from lightning_sp.loss.output_head.part_functions import OfRows, on_part

_GRAD_FN = vars(torch._C.TensorBase)["grad_fn"].__get__
_OF_GRADIENTS = {Tensor.register_hook, Tensor.retain_grad, Tensor.requires_grad_, torch.autograd.grad}
# What gives their memory away: whoever has it may write to it unseen.
_GIVES_MEMORY = {
    Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.untyped_storage, Tensor.storage, Tensor.data_ptr,
}  # fmt: skip
# What writes to its first argument, beside names that end in one underscore.
_IN_PLACE = "add sub mul truediv floordiv mod pow and or xor lshift rshift"
_WRITES = {"__setitem__", *(f"__i{name}__" for name in _IN_PLACE.split())}


@dataclass(frozen=True)
class Link:
    """How logits come of other ones.

    Args:
        parent: those.
        take: makes these of those, when these exist; None where these are made of hidden states of their own.
        is_view: whether torch gives a view: what is written to one is written to both.
    """

    parent: DeferredLogits
    take: Recorded | None
    is_view: bool


class DeferredLogits(DeferredTensor):
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
    link: Link | None
    _made: Tensor | None
    _made_version: int

    @staticmethod
    def of(
        call: HeadCall,
        hidden: Tensor,
        *,
        functions: tuple[Recorded, ...] = (),
        dtype: torch.dtype | None = None,
        class_dim: int = -1,
        link: Link | None = None,
        blank: Tensor | None = None,
    ) -> DeferredLogits:
        """Return the logits of some hidden states. Shapes: (..., E) -> (..., V), or (B, V, s) with class_dim=1."""
        shape = [*hidden.shape[:-1]]
        shape.insert(len(shape) if class_dim == -1 else class_dim, call.num_words)
        has_graph = call.requires_grad and torch.is_grad_enabled() and (link is None or link.parent.has_graph)
        empty = Tensor._make_wrapper_subclass(DeferredLogits, shape, dtype=dtype or call.dtype, device=hidden.device)
        empty.call, empty.hidden, empty.functions, empty.class_dim = call, hidden, functions, class_dim
        empty.has_graph, empty.link, empty._made, empty._made_version = has_graph, link, None, 0
        empty.blank = torch.empty(shape, device="meta") if blank is None else blank
        if has_graph and not isinstance(call, LaterHeadCall):
            empty = _WithGraph.apply(hidden, *call.parameters, [empty])  # type: ignore[no-untyped-call]
        call.add(empty)
        return empty

    def make(self) -> Tensor:
        """Return the logits themselves, made once; a part of the tokens alone where the others' are not there."""
        if self._made is None:
            link = self.link
            with torch.set_grad_enabled(self.has_graph):
                if link is not None and link.take is not None and self._comes_of_parent(link):
                    self._keep(link.take(link.parent.make()), of_parent=True)
                else:
                    self._keep(_finished(self.call.logits(self.hidden), self.functions, self.class_dim))
        assert self._made is not None
        return self._made

    def _comes_of_parent(self, link: Link) -> bool:
        """Return whether these are to be taken from what they come of; a copy of what was written to since has the numbers of before."""
        parent = link.parent
        if parent.is_made:
            return link.is_view or parent._made is None or parent._made._version == parent._made_version
        return parent.hidden.numel() == self.hidden.numel()

    def _keep(self, made: Tensor, *, of_parent: bool = False) -> None:
        self._made, self._made_version = made, made._version
        if of_parent or self.link is None or not self.link.is_view:
            self.link = None  # what was made of a part alone may yet have to be a view of the whole

    @property
    def is_made(self) -> bool:
        """Whether the logits exist, or those that they are a view of."""
        return self._made is not None or (self.link is not None and self.link.is_view and self.link.parent.is_made)

    @property
    def is_final(self) -> bool:
        """Whether only the logits themselves will do: they were written to, or somebody asked for their gradient."""
        if self.call.is_final or (self._made is not None and self._made._version != self._made_version):
            return True
        return self.link is not None and self.link.is_view and self.link.parent.is_final

    def be_a_view(self) -> None:
        """Exist, and share memory with the logits that these are a view of."""
        link = self.link
        if link is not None and link.is_view and link.take is not None:
            link.parent.be_a_view()
            with torch.set_grad_enabled(self.has_graph):
                self._keep(link.take(link.parent.make()), of_parent=True)
        self.make()

    def like(self, hidden: Tensor, take: Recorded, class_dim: int = -1) -> DeferredLogits:
        """Return the logits of some of the tokens, and how they are taken from all."""
        try:
            blank = take(self.blank)
        except (RuntimeError, NotImplementedError, TypeError, IndexError):
            blank = None  # tokens that are chosen by values: a copy
        is_view = blank is not None and blank.untyped_storage()._cdata == self.blank.untyped_storage()._cdata
        link = Link(self, take, is_view)
        return DeferredLogits.of(
            self.call, hidden, functions=self.functions, dtype=self.dtype, class_dim=class_dim, link=link,
            blank=blank if is_view else None,
        )  # fmt: skip

    def source_of_tokens(self) -> Tensor | None:
        """Return the hidden states of each token; None where the logits were written to, or their vocabulary is not the last dim."""
        return None if self.is_final or self.class_dim != -1 else self.hidden

    def of_other_tokens(self, source: Tensor) -> DeferredLogits:
        """Return the logits of hidden states that were taken of these: on other ranks, so that they are no part of these logits."""
        link = Link(self, None, False)
        return DeferredLogits.of(self.call, source, functions=self.functions, dtype=self.dtype, link=link)

    def saved(self) -> DeferredLogits:
        """Return what autograd saves in their place, and gives a graph when it is read: the same, as far as a recomputation sees."""
        own = Tensor._make_wrapper_subclass(DeferredLogits, self.shape, dtype=self.dtype, device=self.device)
        own.call, own.hidden, own.functions, own.class_dim = self.call, self.hidden, self.functions, self.class_dim
        own.has_graph, own.link, own.blank = self.has_graph, Link(self, lambda made: made, True), self.blank
        own._made, own._made_version = None, 0
        self.call.add(own)
        return own

    def then(self, function: Recorded, dtype: torch.dtype) -> DeferredLogits:
        """Return what a function makes of the logits of each token."""
        functions = (*self.functions, function)
        moved = self._vocabulary_last(function)
        return DeferredLogits.of(
            self.call,
            self.hidden,
            functions=functions,
            dtype=dtype,
            class_dim=self.class_dim,
            link=Link(self, moved, False),
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
        of_tokens = CrossEntropyOfTokens(targets=targets, ignore_index=ignore_index, dtype=wide, part=self.call.part)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.has_graph):
            return self.call.summed(self.hidden.flatten(0, -2), of_tokens)

    def _of_tokens(self, of_rows: OfRows, others: tuple[Tensor, ...]) -> Callable[[Tensor, int, int], Tensor]:
        if self.call.part is not None:
            return on_part(self.functions, of_rows, others, self.call.part)

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
        return _answer(function, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make the logits where torch looks below its functions; not where autograd saves them under a hook of saved tensors."""
        if function is torch.ops.aten.detach.default and not args[0].is_final:
            return args[0].saved()
        return _of_made(function, args, kwargs or {}, writes=function._schema.is_mutable)


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
            logits = _finished(ctx.call.product(*given), ctx.functions, ctx.class_dim)
        wanted = [each for each, need in zip(given, needed, strict=True) if need]
        found = iter(gradients_of(logits, wanted, gradient))
        return (*(next(found).to(saved[i].dtype) if need else None for i, need in enumerate(needed)), None)


@torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
def _answer(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a function, answer it by the shape, or call it with the logits. A compiler gets what comes of that."""
    own = args[0] if args and isinstance(args[0], DeferredLogits) else None
    if own is not None and function is Tensor.register_hook and _is_of_fsdp(args[1]):
        return own._hook(args[1])
    if function in _OF_GRADIENTS:
        _watch(function, args, kwargs)
    if own is not None and not own.is_made:
        if function in QUERIES:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if function == _GRAD_FN:
            return own.hidden.grad_fn
    if own is not None and not own.is_final:
        for known in (VIEWS, RECORDED, AGGREGATES):
            found = known.get(function)
            result = NotImplemented if found is None else found(own, function, args, kwargs)
            if result is not NotImplemented:
                return result
    return _of_made(function, args, kwargs, writes=_writes(function, kwargs))


def _watch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let what follows use the logits themselves, for somebody has asked for their gradient.

    Raises:
        SequenceParallelError: a loss was computed of them already, without them.
    """
    for each in tree_leaves((args, kwargs)):
        if isinstance(each, DeferredLogits):
            if each.call.gave_loss:
                raise SequenceParallelError(
                    f"{function.__name__} asks for the gradient of logits {tuple(each.shape)} of which a loss was computed already, chunk by "
                    "chunk, so that they have none: ask before the loss is computed, or give loss_chunk_tokens=None"
                )
            each.call.is_final = True


def _writes(function: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a function writes to a tensor that it is given."""
    name = getattr(function, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    is_asked = kwargs.get("out") is not None or bool(kwargs.get("inplace"))
    return is_in_place or is_asked or name in _WRITES or name == "__set__" or function in _GIVES_MEMORY


def _of_made(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, writes: bool) -> Any:
    """Call a function with logits in place of deferred ones. What shares memory shares it before one of them is written to."""
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, DeferredLogits)]
    if writes:
        for call in {id(each.call): each.call for each in given}.values():
            call.share_memory()
            call.is_final = True
    made_args, made_kwargs = tree_map(make_logits, (args, kwargs))
    result = function(*made_args, **made_kwargs)
    # A part that was made alone, and a view of it that somebody may write to.
    alone = [each for each in given if each.link is not None]
    if alone and not writes:
        own = {each.make().untyped_storage()._cdata for each in alone}
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.layout == torch.strided]
        if any(each.untyped_storage()._cdata in own for each in tensors):
            for each in alone:
                each.be_a_view()
            made_args, made_kwargs = tree_map(make_logits, (args, kwargs))
            return function(*made_args, **made_kwargs)
    return result


def _finished(logits: Tensor, functions: tuple[Recorded, ...], class_dim: int) -> Tensor:
    """Return what was done to the logits of a head."""
    for each in functions:
        logits = each(logits)
    return logits if class_dim == -1 else logits.movedim(-1, class_dim)


def recorded(transform: Recorded, call: UnreadCall, hidden: Tensor) -> tuple[Recorded, ...] | None:
    """Return what a function does to logits, as functions that are known; None where it reads them. Shapes: hidden (n, E)."""
    try:
        done = transform(DeferredLogits.of(call, hidden))
    except LogitsReadError:
        return None
    return done.functions if isinstance(done, DeferredLogits) and done.hidden is hidden else None


def is_deferred(value: Any) -> bool:
    """Return whether a value is of this kind."""
    return isinstance(value, DeferredLogits)


def make_logits(value: Any) -> Any:
    """Return the logits for deferred ones, anything else as it is."""
    return value.make() if isinstance(value, DeferredLogits) else value


def _is_of_fsdp(hook: Any) -> bool:
    """Return whether a hook is that by which FSDP2 gathers a unit for its backward."""
    return isinstance(getattr(hook, "__self__", None), FSDPState)
