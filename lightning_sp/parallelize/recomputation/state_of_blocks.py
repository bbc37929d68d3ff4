"""What a block keeps from one call to the next: counters, batch norm's statistics, a list of losses, a random generator, a switch.

    forward        of a checkpointed block; it may write to what it keeps
    ...            others may write to it, too: a second forward, `model.scale = 2.0`, `model.eval()`
    recomputation  in the backward; it sees what its forward saw, and what it writes is gone behind it

So a block is as it would be without a checkpoint, where torch's own would count twice. Looked at are the attributes and buffers of its
modules, what lists, dicts and the user's own objects in them and among its arguments hold, and random generators. So is what else the user's
code keeps, in files, classes, closures and the owners of hooks: in each call if it is little, else what the first call has changed.

Small tensors are copied in each call, without a wait for the device; larger ones in the first, and later those that it wrote to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.recomputation.copies import num_bytes
from lightning_sp.parallelize.recomputation.noted_state import LARGEST, Name, NotedState
from lightning_sp.users_code.contents import members_of
from lightning_sp.users_code.kept_outside import kept_outside
from lightning_sp.users_code.ownership import is_object_of_user

# Of what is not the block's own, so many elements of lists and dicts are looked at: a file may hold a corpus.
_MOST_OUTSIDE = 100_000


class BlockState:
    """What one block keeps. A class because its first call tells which larger tensors it writes to, and what it changes elsewhere.

    Args:
        block: the module.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.is_known = False
        self.written: set[Name] = set()
        # What the user's code keeps that is not the block's own: all of it, and where the first call has changed something.
        self.elsewhere: list[Any] = []
        self.outside: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a block learns for itself."""
        return BlockState, (self.block,)


class _SeenState:
    """What one call of a block saw. A class because its recomputations are to see it again.

    Args:
        state: of the block.
        given: the call's arguments. Lists, dicts and objects of the user's among them are looked at, too.
    """

    def __init__(self, state: BlockState, given: Iterable[Any]) -> None:
        self._state = state
        # Nothing of this is an operator of the block's: a selective checkpoint counts those of a recomputation.
        with _disable_current_modes():
            if not state.is_known:
                state.elsewhere = list(_outside(state.block))
            fixed = {id(each) for each in state.elsewhere}
            self._own = NotedState(state.written, is_first=not state.is_known, fixed=fixed)
            held = [each for each in given if isinstance(each, (dict, list, set, deque)) or is_object_of_user(each)]
            modules = [*state.block.modules()]
            self._own.visit([*modules, members_of(modules), *state.outside, *held])
            self._outside = NotedState(set(), is_first=True, visited=self._own.visited, fixed=fixed, most=_MOST_OUTSIDE)
            if not state.is_known:
                self._outside.visit([*state.elsewhere])

    def compare(self) -> None:
        """Compare with what there is behind the forward.

        Raises:
            SequenceParallelError: it wrote to a tensor of which there is no copy.
        """
        state = self._state
        if not state.is_known:
            state.is_known = True
            with _disable_current_modes():
                state.written |= self._own.names_written() | self._outside.names_written()
                if not self._outside.is_small:
                    self._outside.keep_changed()
            state.outside = self._outside.roots()
        if (found := self._own.written_without_copy()) is not None:
            name, tensor = found
            raise SequenceParallelError(
                f"activation_checkpointing: the forward of {type(state.block).__name__} writes in place to a tensor of shape "
                f"{tuple(tensor.shape)} that it keeps ({name!r}), and {_why_not_copied(tensor)}: the backward, which computes the block again, "
                "would see what was written; make another tensor of it (`self.n = self.n + 1`), or use activation_checkpointing='none'"
            )
        self._own.settle(state.written)
        self._outside.settle(state.written)

    def show(self) -> Callable[[], None]:
        """Let everything be as it was; return what takes that back."""
        with _disable_current_modes():
            undo = [self._own.show(), self._outside.show()]

        def take_back() -> None:
            for each in undo:
                each()

        return take_back


def once(state: BlockState, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is `forward` in its first call; in those that follow it sees what that saw, and leaves nothing behind.

    Args:
        state: of the block whose forward it is.
        forward: to be recomputed.
    """
    seen: _SeenState | None = None

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)  # a graph writes to what a block keeps once, in its forward
        if seen is None:
            seen = _SeenState(state, (*args, *kwargs.values()))
            output = forward(*args, **kwargs)
            seen.compare()
            return output
        take_back = seen.show()
        try:
            return forward(*args, **kwargs)
        finally:
            take_back()

    return run


def leaves_alone(module: nn.Module, call: Callable[[], object]) -> bool:
    """Return whether a call leaves what a module keeps, and what else its code keeps, as it was; where it does not, that is put back.

    Args:
        module: that is called, with the modules in it.
        call: of it.
    """
    own = NotedState(set(), is_first=True)
    own.visit([*module.modules()])
    outside = NotedState(set(), visited=own.visited, most=_MOST_OUTSIDE)
    outside.visit(list(_outside(module)))
    looks = own, outside
    call()
    for look in looks:
        look.keep_changed()
        look.put_back()
    return all(look.is_empty for look in looks)


def _outside(block: nn.Module) -> Iterator[Any]:
    """Yield what a block may write to that is not its own: what its code keeps, and the owners of hooks."""
    modules = list(block.modules())
    for kept in kept_outside(modules):
        yield from (each for each in (kept.value, kept.place) if each is not None)
    for module in modules:
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            yield from hooks.values()


def _why_not_copied(tensor: Tensor) -> str:
    if tensor.requires_grad:
        return "it has a gradient"
    size = num_bytes(tensor)
    if size is None:
        return "tensors of its kind are not copied"
    if size > LARGEST:
        return f"it has {size:,} bytes"
    return f"there is no copy of its {size:,} bytes, for the first call did not write to it, or a tuple holds it"
