"""Modules that attend to tokens which are not the sequence's: while one of them runs, no step is in progress.

They run whole on every rank of a sequence. What they draw at random, dropout, must be the same there: the tokens of one image come from one
mask. So each call begins the random streams from a seed of the micro-batch and of the call's number, and puts this rank's own back.
The preflight finds them, and the structure of a model tells an encoder that reads no sequence of the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_sp.context.streams import mixed_seed, streams_from
from lightning_sp.devices import is_accelerator, runtime


class WholeCalls:
    """Numbers a step's calls of such modules: a recomputed call gets the number of its forward. Recognised by the CPU's random state.

    The states differ between ranks, the numbers do not.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def number(self) -> int | None:
        """Return the number of the call that is about to be made; None in a backward, of a call that the forward has not made."""
        # Not by a draw: a block that is recomputed by itself may call nothing of torch that its forward did not.
        state = hash(torch.get_rng_state().numpy().tobytes())
        # torch.utils.checkpoint recognises a backward by the same number; there is no public name.
        if state not in self._numbers and torch._C._current_graph_task_id() != -1:
            return None
        torch.randint(2**62, (), device="cpu")  # the next call has another state
        return self._numbers.setdefault(state, len(self._numbers))


class UnshardedModules:
    """What is known of a model's attention; a class because hooks on the model's modules follow it.

    Args:
        context: a `SequenceContext`.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._undo = ExitStack()
        self._suspended: list[tuple[Any, ExitStack]] = []
        self.known = False
        self.found_any = False
        self._has_encoder = False
        # What `set` was given last.
        self.told: tuple[Sequence[nn.Module] | None, Sequence[nn.Module]] | None = None

    @property
    def knows_encoder(self) -> bool:
        """Whether the step's batch is of a decoder alone, whose encoder is known by the model's structure."""
        step = self._context.step
        return self._has_encoder and step is not None and step.batch.encoder_is_whole

    @property
    def suspended_step(self) -> Any:
        """The step in which one of these modules runs; None while none does."""
        return self._suspended[0][0] if self._suspended else None

    def set(self, whole: Sequence[nn.Module] | None, crossing: Sequence[nn.Module] = ()) -> None:
        """Let these modules, and what they hold, be called without a step in progress.

        Args:
            whole: those that run whole on every rank; None where nothing is known of the model.
            crossing: attention of each rank's own queries to what those give: ranks draw its dropout for themselves.
        """
        self._undo.close()
        if self._context.global_view:
            return  # there tensors say themselves whose tokens they have
        self.told = whole, crossing
        self.known, self.found_any = whole is not None, bool(whole or crossing)
        # What they hold, too: a checkpointed block is recomputed by itself.
        for roots, alike in ((whole or (), True), (crossing, False)):
            for module in {each for root in roots for each in root.modules()}:
                self._suspend_in(module, _always, self._undo, alike=alike)

    def leave(self) -> None:
        """Let all modules be called as they are, until `come_back`."""
        self._undo.close()
        self.known = self.found_any = self._has_encoder = False

    def come_back(self) -> None:
        """Know again what was told before `leave`."""
        if self.told is not None:
            self.set(*self.told)

    def add_encoder(self, encoder: nn.Module, undo: ExitStack) -> None:
        """Let an encoder run whole in steps of a batch that holds no sequence of it; `undo` takes that back."""
        self._has_encoder = True
        for module in encoder.modules():
            self._suspend_in(module, lambda *_: self.knows_encoder, undo, alike=True)

    def add_cross_attention(self, module: nn.Module, argument: str, undo: ExitStack) -> None:
        """Let attention that is given such an encoder's output by `argument` see all of it; `undo` takes that back."""
        signature = inspect.signature(module.forward)

        def reads_encoder(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            return self.knows_encoder and signature.bind_partial(*args, **kwargs).arguments.get(argument) is not None

        self._suspend_in(module, reads_encoder, undo, alike=False)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let no step be in progress within, where the batch holds no sequence of the encoder."""
        self._enter(self.knows_encoder, False)
        try:
            yield
        finally:
            self._leave()

    def _suspend_in(self, module: nn.Module, when: Callable[[Any, Any], bool], undo: ExitStack, *, alike: bool) -> None:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._enter(when(args, kwargs), alike)

        undo.callback(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True).remove)
        undo.callback(module.register_forward_hook(self._leave, always_call=True).remove)
        self._suspend_recomputation(module, when, undo, alike)

    def _suspend_recomputation(
        self, module: nn.Module, when: Callable[[Any, Any], bool], undo: ExitStack, alike: bool
    ) -> None:
        """A checkpointed block calls its own forward again in the backward, and not its hooks."""
        checkpointed = vars(module).get("forward")
        if not isinstance(checkpointed, partial) or not checkpointed.args:
            return
        forward, *others = checkpointed.args

        def suspended(*args: Any, **kwargs: Any) -> Any:
            self._enter(when(args, kwargs), alike)
            try:
                return forward(*args, **kwargs)
            finally:
                self._leave()

        module.forward = partial(checkpointed.func, suspended, *others, **checkpointed.keywords)
        undo.callback(setattr, module, "forward", checkpointed)

    def _enter(self, suspends: bool, alike: bool) -> None:
        step, undo = self._context.step, ExitStack()
        self._suspended.append((step, undo))
        if not suspends:
            return
        if alike and step is not None and step.batch.seed is not None and not torch.compiler.is_compiling():
            self._draw_alike(step, undo)
        self._context.step = None

    def _leave(self, *_: Any) -> None:
        self._context.step, undo = self._suspended.pop()
        undo.close()

    def _draw_alike(self, step: Any, undo: ExitStack) -> None:
        """Let the outermost of these modules draw what it draws on all ranks of the sequence; `undo` gives the rank's own streams back.

        A recomputed call draws what its forward did. A block inside of one, recomputed by itself, is left alone: its checkpoint has put back
        the streams that it had then.
        """
        number = step.whole_calls.number()
        if number is None:
            return
        base = self._context.mesh.base
        device = torch.device(base.device_type)
        if is_accelerator(device):
            device = torch.device(device.type, runtime(device).current_device())
        undo.enter_context(streams_from(mixed_seed(step.batch.seed, 0, number), device))


def _always(*_: Any) -> bool:
    return True
