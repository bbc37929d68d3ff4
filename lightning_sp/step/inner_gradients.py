"""`torch.autograd.grad` inside of a step: of tensors that the step makes, and of weights.

a sharded weight               a backward of its own (`parallelize.gradients_of_weights`), in either view
a weight that is whole, and    one device's (`global_view.step_gradients`); on a rank's part other tensors get torch's own, which the
any tensor in the global view  preflight compares
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.distributed.tensor import DTensor

from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.step_gradients import UNUSED, gradients_of_step
from lightning_sp.global_view.tensors.sequence_tensor import whole_of
from lightning_sp.parallelize import gathering_again, gradients_of_weights, whole_parameters, without_reduction
from lightning_sp.users_line import users_line


@contextmanager
def inner_gradients(context: SequenceContext, module: nn.Module) -> Iterator[None]:
    """Make `torch.autograd.grad` of a step one device's while this is entered."""
    original = torch.autograd.grad
    # A mode of torch, the preflight's say, hands a call in progress to whatever has torch's name.
    in_progress: list[bool] = []

    def grad(
        outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
        only_inputs: bool = True, allow_unused: bool | None = None, is_grads_batched: bool = False, materialize_grads: bool = False,
    ) -> Any:  # fmt: skip
        given = _list(inputs)
        sharded = [each for each in given if isinstance(each, DTensor) or hasattr(each, "is_term")]
        of_step = _of_step(context, module, given)
        running = context.loss_step is not None or context.reference is not None
        within_backward = torch._C._current_graph_task_id() != -1
        apart = in_progress or not running or within_backward or torch.compiler.is_compiling()
        if apart or not (sharded or of_step):
            # A backward frees what units have gathered, which the step's own has yet to go through.
            with nullcontext() if apart else without_reduction(module):
                return (gathering_again(module, original) if create_graph and not apart else original)(
                    outputs, inputs, grad_outputs, retain_graph, create_graph, only_inputs, allow_unused, is_grads_batched, materialize_grads
                )  # fmt: skip
        _check(sharded, create_graph, is_grads_batched)
        asked = _Asked(
            context=context, module=module, original=gathering_again(module, original) if create_graph else original,
            outputs=_list(outputs), seeds=_seeds(outputs, grad_outputs),
            keeps_graph=create_graph if retain_graph is None else retain_graph, create_graph=create_graph,
            allow_unused=bool(allow_unused) or materialize_grads,
        )  # fmt: skip
        in_progress.append(True)
        try:
            found = asked.gradients(given, sharded, of_step)
        finally:
            in_progress.pop()
        return tuple(
            torch.zeros_like(each) if g is None and materialize_grads else g
            for g, each in zip(found, given, strict=True)
        )

    torch.autograd.grad = grad
    try:
        yield
    finally:
        torch.autograd.grad = original


@dataclass(frozen=True, kw_only=True, eq=False)
class _Asked:
    """What a step asks for.

    Args:
        original: torch's own function.
        seeds: of the outputs; None for 1.
        keeps_graph: whether the graph has another backward.
    """

    context: SequenceContext
    module: nn.Module
    original: Callable[..., Any]
    outputs: Sequence[Tensor]
    seeds: Sequence[Tensor | None]
    keeps_graph: bool
    create_graph: bool
    allow_unused: bool

    def gradients(self, given: Sequence[Any], sharded: Sequence[Any], of_step: Sequence[Any]) -> list[Tensor | None]:
        """Return the gradients by each input; the last backward frees the graph."""
        others = [each for each in given if not _is_among(each, sharded) and not _is_among(each, of_step)]
        kinds = [(self._own, others), (self._of_step, of_step), (self._of_weights, sharded)]
        todo = [(get, inputs) for get, inputs in kinds if inputs]
        found: dict[int, Tensor | None] = {}
        for number, (get, inputs) in enumerate(todo, 1):
            results = get(inputs, keep=self.keeps_graph or number < len(todo))
            found.update((id(each), result) for each, result in zip(inputs, results, strict=True))
        return [found[id(each)] for each in given]

    def _own(self, inputs: Sequence[Tensor], *, keep: bool) -> Sequence[Tensor | None]:
        with without_reduction(self.module):
            found: tuple[Tensor | None, ...] = self.original(
                self.outputs, inputs, self.seeds, allow_unused=self.allow_unused, **self._graph(keep)
            )
        return found

    def _of_step(self, inputs: Sequence[Tensor], *, keep: bool) -> Sequence[Tensor | None]:
        mesh = self.context.mesh
        with without_reduction(self.module):
            return gradients_of_step(
                self.original, self.outputs, inputs, self.seeds, sequence_group=mesh.sequence_group if mesh.layout.size > 1 else None,
                num_groups=mesh.data_parallel_size, allow_unused=self.allow_unused, **self._graph(keep),
            )  # fmt: skip

    def _of_weights(self, inputs: Sequence[Tensor], *, keep: bool) -> Sequence[Tensor | None]:
        found = gradients_of_weights(self.module, _number(self.outputs, self.seeds), inputs, keep_graph=keep)
        if not self.allow_unused and any(each is None for each in found):
            raise RuntimeError(UNUSED)
        return found

    def _graph(self, keep: bool) -> dict[str, bool]:
        return {"retain_graph": keep, "create_graph": self.create_graph}


def _check(sharded: Sequence[Any], create_graph: bool, is_grads_batched: bool) -> None:
    if is_grads_batched:
        raise SequenceParallelError(
            f"torch.autograd.grad(is_grads_batched=True) in a step ({users_line()}): torch.vmap sees one of many, which a part of a sequence "
            "has not; call it once for each row of grad_outputs"
        )
    if sharded and create_graph:
        raise SequenceParallelError(
            f"torch.autograd.grad of a sharded weight with create_graph=True ({users_line()}): FSDP2 adds the ranks' gradients up outside of "
            "autograd, so they have no derivative of their own; leave create_graph out, as first-order MAML and GradNorm by detached norms do, "
            "or make what is differentiated twice a layer that is a direct child of the LightningModule, and ask before any manual_backward, "
            "which frees it"
        )


def _of_step(context: SequenceContext, module: nn.Module, given: Sequence[Any]) -> list[Any]:
    """Return the inputs whose gradients are made over the ranks: in the global view all but sharded weights, else weights that are whole."""
    if context.step is None:
        return []
    if context.global_view:
        # A level of torch.func has no tensor of the sequence, so that each rank has the whole of it.
        return [
            each
            for each in given
            if not isinstance(each, DTensor) and not hasattr(each, "is_term") and not is_functorch_wrapped_tensor(each)
        ]
    whole = whole_parameters(module)
    return [each for each in given if _is_among(each, whole)]


def _is_among(value: Any, others: Sequence[Any]) -> bool:
    return any(value is each for each in others)


def _list(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else list(value)


def _seeds(outputs: Any, given: Any) -> list[Tensor | None]:
    return [None] * len(_list(outputs)) if given is None else _list(given)


def _number(outputs: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> Tensor:
    """Return one number of which every rank has the same, and whose gradient is asked for."""
    each = [output if seed is None else (output * seed).sum() for output, seed in zip(outputs, seeds, strict=True)]
    total: Tensor = whole_of(sum(each[1:], each[0]))
    return total.reshape(())
