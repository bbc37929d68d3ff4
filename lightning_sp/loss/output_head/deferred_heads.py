"""Which heads' logits wait for what is asked of them: the output embeddings of a model's language models, while a step runs.

Known by Hugging Face's protocol, `get_output_embeddings()`, which the models here follow too. A head is left alone where it is no plain
`nn.Linear`, where it is compiled, or where somebody has given it another forward or hooks of its gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.parametrize import is_parametrized

from lightning_sp.context.step import SequenceContext
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor
from lightning_sp.loss.output_head.deferred_logits import DeferredLogits
from lightning_sp.loss.output_head.head_call import HeadCall
from lightning_sp.weights.autocast import AutocastWeight
from lightning_sp.weights.vocabulary_part import vocabulary_part

# On the forward of a head whose logits wait.
_WAITS = "_logits_wait"


class DeferredHeads(AbstractContextManager[None]):
    """Lets output heads give logits that are made when they are read, in a step, until it exits.

    Args:
        context: of the steps.
        root: the model.
        chunk_tokens: how many tokens' logits exist at a time in a loss, or "auto"; None leaves the heads alone.
        is_freed: whether FSDP frees a unit's weights when its forward ends.
        told_before_freed: (root, weight, function): calls it before a weight that is whole is freed, until what it gives closes. Manual
            optimization has backwards, and steps of optimizers, before a step reads its logits.
    """

    def __init__(
        self,
        context: SequenceContext,
        root: nn.Module,
        chunk_tokens: int | str | None,
        is_freed: Callable[[FSDPModule], bool] = lambda _: True,
        told_before_freed: Callable[..., ExitStack] = lambda *_: ExitStack(),
    ) -> None:
        self._context, self._root, self._chunk_tokens, self._is_freed = context, root, chunk_tokens, is_freed
        self._told_before_freed = told_before_freed
        self._undo = ExitStack()
        self._calls: list[weakref.ref[HeadCall]] = []
        # Of each head's unit how many of its forwards are running: until its end the weights are whole.
        self._running: dict[FSDPModule, int] = {}

    def __enter__(self) -> None:
        if self._chunk_tokens is None:
            return
        unit: Any
        for head, unit in _output_heads(self._root):
            before = vars(head).get("forward")
            head.forward = MethodType(_deferring(self, unit, before), head)  # type: ignore[method-assign]
            self._undo.callback(_put_back, head, before)
            self._undo.enter_context(self._told_before_freed(self._root, head.weight, partial(self._keep_held, head)))
            if unit is not None and unit not in self._running:
                self._running[unit] = 0
                self._undo.callback(unit.register_forward_pre_hook(self._enter, prepend=True).remove)
                # Before FSDP's own, which frees the weights.
                self._undo.callback(unit.register_forward_hook(self._leave, prepend=True, always_call=True).remove)
        self._context.at_step_end.append(self.make_all)
        self._undo.callback(self._context.at_step_end.remove, self.make_all)

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        self._running.clear()

    def defers(self, head: nn.Linear, hidden: Tensor) -> bool:
        """Return whether a call's logits can wait."""
        context = self._context
        return (
            context.loss_step is not None
            and context.reference is None
            and context.defers_logits
            and not torch.compiler.is_compiling()
            and type(hidden) is Tensor
            and not is_parametrized(head)  # each look at its weight computes that anew, and spectral_norm moves on
            and type(head.weight) in (Tensor, nn.Parameter, AutocastWeight)
            and hidden.ndim > 1
            and hidden.shape[-1] == head.in_features
            and (hidden.dtype == head.weight.dtype or torch.is_autocast_enabled(hidden.device.type))
        )

    def call(self, head: nn.Linear, hidden: Tensor, unit: FSDPModule | None) -> DeferredLogits:
        """Return the logits of a call."""
        assert self._chunk_tokens is not None
        call = HeadCall(head, hidden, self._chunk_tokens)
        self._calls = [each for each in self._calls if each() is not None]
        self._calls.append(weakref.ref(call))
        # A call from outside of its unit's forward stands for the unit's; in a backward a checkpoint makes what it will use at once.
        if unit is not None and not self._running[unit] and torch._C._current_graph_task_id() == -1:
            call.keep()
        return DeferredLogits.of(call, hidden)

    def make_all(self) -> None:
        """Make the logits that somebody still holds: after the step the weights are others."""
        for each in self._alive():
            each.make_all()
        self._calls.clear()

    def _alive(self) -> Iterator[HeadCall]:
        yield from (call for each in self._calls if (call := each()) is not None)

    def _keep_held(self, head: nn.Linear) -> None:
        """Copy weights that are about to be freed, for logits that somebody still holds."""
        for call in self._alive():
            if call.weight is head.weight and call.is_held:
                call.keep()

    def _enter(self, unit: FSDPModule, args: Any) -> None:
        self._running[unit] += 1

    def _leave(self, unit: FSDPModule, args: Any, output: Any) -> None:
        self._running[unit] -= 1
        if not self._running[unit] and self._is_freed(unit):
            inside: Any = unit
            weights = {parameter for module in inside.modules() for parameter in module.parameters(recurse=False)}
            for call in self._alive():
                if call.weight in weights:
                    call.keep()


def defers_logits(root: nn.Module) -> bool:
    """Return whether a model has an output head whose logits wait for what is asked of them, in a run or before it."""
    in_a_run = any(hasattr(vars(each).get("forward"), _WAITS) for each in root.modules())
    return in_a_run or any(True for _ in _output_heads(root))


def _put_back(head: nn.Linear, before: Any) -> None:
    del head.forward
    if before is not None:
        head.forward = before  # type: ignore[method-assign]


def _deferring(
    heads: DeferredHeads, unit: FSDPModule | None, before: Callable[[Tensor], Tensor] | None
) -> Callable[[nn.Linear, Tensor], Tensor]:
    def at_once(head: nn.Linear, hidden: Tensor) -> Tensor:
        return nn.Linear.forward(head, hidden) if before is None else before(hidden)

    # Bound as a method, and of this name: a copy of the head has it for the copy, a pickle for its class.
    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        if isinstance(input, SequenceTensor):
            own = input.placement
            waits = own.dim < input.dim() - 1 and heads.defers(self, input.local)
            return SequenceTensor(heads.call(self, input.local, unit), own) if waits else at_once(self, input)
        return heads.call(self, input, unit) if heads.defers(self, input) else at_once(self, input)

    setattr(forward, _WAITS, True)
    return forward


def _output_heads(root: nn.Module) -> Iterator[tuple[nn.Linear, FSDPModule | None]]:
    """Yield each output head that can wait, and the unit of FSDP that frees its weights; None where they stay whole in a step."""
    names, modules = {each: name for name, each in root.named_modules()}, dict(root.named_modules())
    heads = {head: None for each in modules.values() if (head := _output_embeddings(each)) is not None}
    for head in heads:
        parts = names[head].split(".") if head in names else None
        if parts is None:
            continue
        above = [modules[".".join(parts[:length])] for length in range(len(parts) + 1)]
        if any(isinstance(each, OptimizedModule) or getattr(each, "_compiled_call_impl", None) for each in above):
            continue
        units: list[Any] = [each for each in above[1:] if isinstance(each, FSDPModule)]
        yield head, units[-1] if units else None


def _output_embeddings(module: nn.Module) -> nn.Linear | None:
    found = getattr(module, "get_output_embeddings", None)
    if not callable(found):
        return None
    try:
        head = found()
    except (AttributeError, NotImplementedError):
        return None  # a model without one
    is_plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
    is_plain = is_plain and ("forward" not in vars(head) or vocabulary_part(head) is not None)
    return head if is_plain and not head._backward_hooks and not head._backward_pre_hooks else None
