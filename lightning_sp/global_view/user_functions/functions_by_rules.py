"""A user's `autograd.Function` that runs by the table of rules, forward and backward, as it is written.

    forward     inputs that show whole sequences     ->   the user's forward      ->   this rank's part of its outputs
    backward    gradients that show whole sequences  ->   the user's backward     ->   this rank's part of the inputs' gradients

To autograd it is one function of this rank's parts, as on one device of whole tensors. Gradients of a step are scaled until its backward has
ended, so the user's backward must be linear: its first call is tried with gradients of two sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils._pytree import tree_leaves

from lightning_sp import comm
from lightning_sp.context.streams import streams
from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.calls.call import whole_is_small
from lightning_sp.global_view.calls.taken_tokens import TakenTokens, plain
from lightning_sp.global_view.exchange.lines import along_dim
from lightning_sp.global_view.exchange.movement import brought
from lightning_sp.global_view.table import scores_made
from lightning_sp.global_view.tensors.deferred import made
from lightning_sp.global_view.tensors.placement import Placement, Storage, part_of
from lightning_sp.global_view.tensors.sequence_tensor import GlobalTensor, SequenceTensor
from lightning_sp.global_view.user_functions.functions_of_tokens import LARGE, SMALL, are_same

Refusal = Callable[[str], SequenceParallelError]


class UsersContext(FunctionCtx):
    """What the user's forward and backward know as `ctx`.

    Args:
        needs_input_grad: as torch's own.
    """

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.to_save: tuple[Any, ...] = ()
        self.dirty_tensors: tuple[Any, ...] = ()
        self.non_differentiable: tuple[Any, ...] = ()
        self.materialize_grads = True
        self.read_saved: Callable[[], tuple[Any, ...]] = lambda: self.to_save

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """What was saved for the backward, as it was."""
        return self.read_saved()


@dataclass(frozen=True, eq=False, kw_only=True)
class _Shown:
    """How a tensor on this rank is shown: as one of a sequence, or as the whole that it is."""

    placement: Placement | None
    shape: torch.Size
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor) -> _Shown:
        placement = replace(x.placement, copied=None) if isinstance(x, SequenceTensor) else None
        return _Shown(placement=placement, shape=x.shape, dtype=x.dtype)

    def __call__(self, part: Tensor) -> Tensor:
        return part if self.placement is None else SequenceTensor(part, self.placement)


@dataclass(eq=False, kw_only=True)
class _Run:
    """One call of a user's function.

    Args:
        cls: the function's class.
        args: whose tensors this rank has parts of, in their places.
        inputs: how they are shown, by their places.
        copies: places of what is no tensor of one device's memory.
        storage: of a sequence among them.
        refusal: the error of a reason.
        outputs: how those are shown, None for what is no tensor.
        is_tuple: whether the user gave several.
    """

    cls: Any
    args: Sequence[Any]
    inputs: dict[int, _Shown]
    copies: set[int]
    storage: Storage
    refusal: Refusal
    outputs: list[_Shown | None] = field(default_factory=list)
    is_tuple: bool = False

    def forward(self, parts: Sequence[Tensor], needs: Sequence[bool]) -> tuple[UsersContext, list[Any]]:
        """Run the user's forward; return its context, and what it gives as it is shown."""
        wanted = [False] * len(self.args)
        args = list(self.args)
        for at, part, is_wanted in zip(self.inputs, parts, needs, strict=True):
            args[at], wanted[at] = self.inputs[at](part), is_wanted
        given = [args[at] for at in self.inputs]
        before = [part._version for part in parts]
        users = UsersContext(tuple(wanted))
        with torch.no_grad():
            if _has_setup_context(self.cls):
                result = self.cls.forward(*args)
                self.cls.setup_context(users, tuple(args), result)
            else:
                result = self.cls.forward(users, *args)
        self._check_writes(users, given, parts, before)
        self.is_tuple = isinstance(result, tuple)
        known: dict[int, Any] = {}
        outputs = [_settled(each, known) for each in (result if self.is_tuple else (result,))]
        users.to_save = tuple(_settled(each, known) for each in users.to_save)
        users.non_differentiable = tuple(_settled(each, known) for each in users.non_differentiable)
        return users, outputs

    def _check_writes(
        self, users: UsersContext, given: list[Any], parts: Sequence[Tensor], before: Sequence[int]
    ) -> None:
        """Refuse writes that would not reach what one device writes into; into what is whole they do, on every rank."""
        written = any(
            part._version != version or (isinstance(shown, SequenceTensor) and shown._local is not part)
            for shown, part, version, at in zip(given, parts, before, self.inputs, strict=True)
            if at in self.copies
        )
        if written or users.dirty_tensors:
            raise self.refusal("its forward writes into a tensor that it is given")

    def backward(self, users: UsersContext, gradients: Sequence[Any]) -> list[Tensor | None]:
        """Run the user's backward; return this rank's part of each input's gradient, one of several equal terms where the input is whole."""
        function = self.cls.backward if self.cls.backward is not torch.autograd.Function.backward else self.cls.vjp
        given = (list(gradients),) if getattr(self.cls, "boxed_grads_call", False) else gradients
        with torch.no_grad():
            found = function(users, *given)
            found = list(found) if isinstance(found, (tuple, list)) else [found]
            if any(each is not None for each in found[len(self.args) :]) or len(found) < len(self.args):
                wanted = f"(expected {len(self.args)}, got {len(found)})"
                raise RuntimeError(
                    f"function {self.cls.__name__}Backward returned an incorrect number of gradients {wanted}"
                )
            return [
                self._part(found[at], shown) if users.needs_input_grad[at] else None
                for at, shown in self.inputs.items()
            ]

    def _part(self, gradient: Any, shown: _Shown) -> Tensor | None:
        if gradient is None:
            return None
        gradient = _summed_to(_settled(gradient, {}), shown.shape)
        own = shown.placement
        if own is None:
            whole = gradient.whole() if isinstance(gradient, SequenceTensor) else gradient
            return whole / self.storage.layout.size  # the ranks' are added up
        if not isinstance(gradient, SequenceTensor):
            return own.without_padding(part_of(gradient, own), 0)
        return own.without_padding(made(self._placed(gradient, own).local), 0)

    def _placed(self, gradient: SequenceTensor, own: Placement) -> SequenceTensor:
        """Return a gradient with the tokens of its input, in the same dim."""
        is_there = gradient.placement.dim == own.dim
        gradient = brought(gradient, own.storage) if is_there else along_dim(gradient, own.dim) or gradient
        if gradient.placement.dim == own.dim and own.same_tokens(gradient.placement):
            return gradient
        if not whole_is_small(gradient):
            raise self.refusal("the gradient that it gives has the sequence in another dim than its input has")
        return SequenceTensor(part_of(gradient.whole(), own), own)


class _ByRules(torch.autograd.Function):
    """What autograd knows of a call: this rank's parts. Shapes: those of the inputs' parts -> those of the outputs' parts."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *parts: Tensor) -> Any:
        users, outputs = run.forward(parts, ctx.needs_input_grad[1:])
        run.outputs = [_Shown.of(each) if isinstance(each, Tensor) else None for each in outputs]
        ctx.run, ctx.users = run, users
        ctx.set_materialize_grads(users.materialize_grads)
        ctx.mark_non_differentiable(*map(_part, users.non_differentiable))
        # By torch's own means: a checkpoint or an offload of activations takes them.
        kept = [None if each is None else _Shown.of(each) for each in users.to_save]
        ctx.save_for_backward(*(each if each is None else _part(each) for each in users.to_save))
        users.to_save = users.non_differentiable = ()
        users.read_saved = lambda: ()
        ctx.kept = kept
        return tuple(_part(each) if isinstance(each, Tensor) else each for each in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        run, users = ctx.run, ctx.users
        users.read_saved = lambda: tuple(
            None if shown is None else shown(part) for part, shown in zip(ctx.saved_tensors, ctx.kept, strict=True)
        )
        if not users.materialize_grads:
            grads = tuple(_alike(grads, run))
        shown = [_gradient_shown(grad, output, run.storage) for grad, output in zip(grads, run.outputs, strict=True)]
        try:
            return None, *run.backward(users, shown)
        finally:
            users.read_saved = lambda: ()  # else it would keep what autograd frees


def by_rules(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, refusal: Refusal, key: Any) -> Any:
    """Run a user's function by the rules of what its forward and backward call.

    Args:
        cls: the function's class.
        args: of its `apply`, tensors of the sequence among them.
        kwargs: likewise, of one that has a `setup_context`.
        refusal: the error of a reason.
        key: what its trial is known by.

    Communicates: what its parts do; in the backward, for each output that is whole, one all_reduce.

    Raises:
        SequenceParallelError: a part of it has no rule; it writes into what it is given, or its backward is not linear.
    """
    if _has_setup_context(cls):
        bound = inspect.signature(cls.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        args, kwargs = bound.args, bound.kwargs
    if kwargs:
        raise TypeError(f"{cls.__name__}.apply() takes no keyword arguments")
    tensors = {at: each for at, each in enumerate(args) if isinstance(each, Tensor)}
    storage = next(each.of_sequence for each in tree_leaves(args) if isinstance(each, GlobalTensor))
    shown = {at: _Shown.of(each) for at, each in tensors.items()}
    others = [None if isinstance(each, Tensor) else each for each in args]
    copies = {at for at, each in tensors.items() if isinstance(each, SequenceTensor | TakenTokens)}
    run = _Run(cls=cls, args=others, inputs=shown, copies=copies, storage=storage, refusal=refusal)
    parts = [_part(each) for each in tensors.values()]
    try:
        if key not in _linear and torch.is_grad_enabled() and any(each.requires_grad for each in parts):
            _check_linear(run, parts)
            _linear.add(key)
        found = _ByRules.apply(run, *parts)  # type: ignore[no-untyped-call]
    except SequenceParallelError:
        raise
    except Exception as error:  # whatever it makes of tensors that a kernel of its own does not know
        raise refusal(f"it fails by the rules of what it calls ({type(error).__name__}: {error})") from error
    results = tuple(each if shown is None else shown(each) for each, shown in zip(found, run.outputs, strict=True))
    return results if run.is_tuple else results[0]


_linear: set[Any] = set()


def _check_linear(run: _Run, parts: Sequence[Tensor]) -> None:
    """Refuse, on all ranks, a function whose backward gives another part of a larger gradient."""
    why = (
        None if _is_linear(run, parts) else "a gradient that is larger by a factor does not give it more by that factor"
    )
    run.storage.agree(str(run.refusal(why)) if why else None)


def _is_linear(run: _Run, parts: Sequence[Tensor]) -> bool:
    found = []
    for scale in (SMALL, LARGE):
        with streams(parts[0].device):
            copies = [each.detach().clone().requires_grad_(each.requires_grad) for each in parts]
            outputs = _ByRules.apply(run, *copies)  # type: ignore[no-untyped-call]
            learned = [(each, at) for each, at in zip(outputs, run.outputs, strict=True) if at and each.requires_grad]
            if not learned:
                return True
            wanted = [each for each in copies if each.requires_grad]
            seeds = [_seed(each, at, scale) for each, at in learned]
            torch.autograd.backward([each for each, _ in learned], seeds, inputs=wanted)
            found.append([each.grad / scale for each in wanted if each.grad is not None])
    return are_same(*found)


def _seed(output: Tensor, shown: _Shown, scale: float) -> Tensor:
    drawn = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own = (drawn * scale).to(output)
    return own if shown.placement is None else shown.placement.without_padding(own, 0)


def _gradient_shown(grad: Tensor | None, output: _Shown | None, storage: Storage) -> Tensor | None:
    """Return what the user's backward gets: of a whole output the sum of what each rank goes on to give it."""
    if grad is None or output is None:
        return None
    return output(grad) if output.placement is not None else comm.reduce_sum(grad, storage.group)


def _alike(grads: Sequence[Tensor | None], run: _Run) -> list[Tensor | None]:
    """Return gradients where some rank has one: None where none has."""
    device = next(each.device for each in grads if each is not None)
    own = torch.tensor([each is not None for each in grads], dtype=torch.uint8, device=device)
    found = comm.largest(own, run.storage.group).tolist()
    return [
        torch.zeros(_local_shape(output), dtype=output.dtype, device=device)
        if is_used and grad is None and output is not None
        else grad
        for grad, is_used, output in zip(grads, found, run.outputs, strict=True)
    ]


def _local_shape(shown: _Shown) -> list[int]:
    shape = list(shown.shape)
    if shown.placement is not None:
        shape[shown.placement.dim] = shown.placement.held
    return shape


def _part(x: Tensor) -> Tensor:
    """Return what autograd knows a tensor by."""
    if isinstance(x, SequenceTensor):
        part: Tensor = made(x.local)
        return part
    return plain(x) if isinstance(x, TakenTokens) else x


def _settled(value: Any, known: dict[int, Any]) -> Any:
    """Return what has numbers in place of scores that were noted, the same for the same."""
    if isinstance(value, GlobalTensor) and not isinstance(value, SequenceTensor):
        if id(value) not in known:
            known[id(value)] = value, scores_made([value])[id(value)]
        return known[id(value)][1]
    return value


def _summed_to(gradient: Tensor, shape: torch.Size) -> Any:
    """Return a gradient in the shape of its input, where that is broadcast to the gradient's; torch does likewise."""
    if gradient.shape == shape:
        return gradient
    ahead = gradient.dim() - len(shape)
    fits = ahead >= 0 and all(own in (1, other) for own, other in zip(shape, gradient.shape[ahead:], strict=True))
    if not fits:
        raise RuntimeError(
            f"a backward returned an invalid gradient: got {tuple(gradient.shape)} but expected shape compatible with {tuple(shape)}"
        )
    dims = [ahead + at for at, own in enumerate(shape) if own == 1 and gradient.shape[ahead + at] != 1]
    summed = gradient.sum([*range(ahead), *dims], keepdim=True) if ahead or dims else gradient
    return summed.reshape(shape)


def _has_setup_context(cls: Any) -> bool:
    return cls.setup_context is not torch.autograd.Function.setup_context
