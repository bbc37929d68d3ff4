"""Writes to shards, gradients and optimizer states outside of a step are those of all ranks, or the run ends before the next update: by their
count, not by numbers.

Each rank holds its own part of a matrix, so no numbers can be compared. But a tensor counts the writes to it, and whether there is a gradient is
known: one rank's `zero_grad()`, a `mul_` of its shards, or `optimizer.state.clear()`, shows in these. They go with the message about each batch;
where code of the user's runs between a backward and its update, in a hook, they are compared once more before the update. So they are before a
checkpoint and at the end of a fit, behind which no batch comes. Writes behind a run are compared when the next one begins, or is saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_sp import comm
from lightning_sp.mesh import SequenceMesh
from lightning_sp.parallelize import num_writes, reshard
from lightning_sp.parameter_names import user_name

_BITS = (1 << 56) - 1
# In the place of a gradient's number of writes. Not -1: Python's hash of it is that of -2.
_NONE, _OTHER = -2, -3


class _Entry(NamedTuple):
    """An entry of an optimizer's state as its step has left it: a tensor that may go, and how often it was written to, or a plain value."""

    value: Any
    writes: int

    @classmethod
    def of(cls, value: Any) -> _Entry:
        """Return what stands there now."""
        return cls(weakref.ref(value), num_writes(value)) if isinstance(value, Tensor) else cls(value, 0)

    def writes_since(self, now: Any) -> int | None:
        """Return how often it was written to since; None where another value stands there."""
        if isinstance(now, Tensor):
            is_same = isinstance(self.value, weakref.ref) and self.value() is now
            return num_writes(now) - self.writes if is_same else None
        return 0 if isinstance(now, (int, float)) and now == self.value else None


class AgreedWrites:
    """Compares what was written in a fit; a class because writes are counted from its begin on."""

    def __init__(self) -> None:
        self._shards: dict[str, Tensor] = {}
        # The module, and not its tensors: torch swaps none that has a weak reference (`module.double()`).
        self._root: Callable[[], nn.Module | None] = lambda: None
        self._left: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self._gradients: dict[str, tuple[Tensor, int]] = {}
        self._stepped: dict[int, Optimizer] = {}
        self._states: dict[int, dict[Any, _Entry]] = {}
        self._undo: Callable[[], None] = _nothing

    def start(
        self,
        root: nn.Module,
        mesh: SequenceMesh,
        group: ProcessGroup | None,
        *,
        plugin: Any,
        optimizers: Sequence[Optimizer],
        acts_between: bool,
    ) -> None:
        """Begin a fit. Every rank must call it.

        Args:
            root: the sharded module.
            mesh: this rank's coordinates.
            group: the world, on a backend for host tensors.
            plugin: Lightning's, which runs hooks between a backward and its update.
            optimizers: of the fit.
            acts_between: whether code of the user's may run there on this rank.

        Communicates: whether it may on any rank, once.
        """
        self.end()
        if comm.size_of(group or comm.world()) == 1:
            return
        self._root = weakref.ref(root)
        reshard(root)
        self._shards = {user_name(name): each for name, each in root.named_parameters()}
        self._before = {name: num_writes(each) for name, each in self._shards.items()}
        undo = [_called_before(plugin, self.note_gradients)]
        if optimizers:
            # Of any optimizer: one around another may lack hooks, and steps by the other's.
            undo.append(register_optimizer_step_post_hook(self._note_states).remove)
        if any(comm.gather_objects(acts_between, group)):
            undo.append(_called_after(plugin, lambda: self._compare_before_update(mesh, group)))

        def undo_all() -> None:
            for each in undo:
                each()

        self._undo = undo_all

    def end(self) -> None:
        """Give Lightning its own back, and let the module go."""
        self._undo()
        if self._shards:
            self._left = {name: num_writes(each) for name, each in self._shards.items()}
        self._undo, self._shards, self._before, self._gradients = _nothing, {}, {}, {}
        self._stepped, self._states = {}, {}

    def note_gradients(self) -> None:
        """Begin to count writes to the gradients that a backward has left, before any hook: those of the backward differ from rank to rank."""
        with _quickly():
            there = {name: each.grad for name, each in self._shards.items() if each.grad is not None}
            self._gradients = {name: (each, num_writes(each)) for name, each in there.items()}

    def _note_states(self, optimizer: Optimizer, *_: Any) -> None:
        """Begin to count writes to what a step has left of an optimizer's state: of shards, not of weights made whole for the step alone."""
        shards = {id(each) for each in self._shards.values()}
        if shards.isdisjoint(map(id, optimizer.state)):
            return
        self._stepped[id(optimizer)] = optimizer
        with _quickly():
            for parameter, state in optimizer.state.items():
                if id(parameter) in shards:
                    self._states[id(parameter)] = {key: _Entry.of(value) for key, value in state.items()}

    @property
    def digest(self) -> int:
        """A number of 56 bits that tells the writes so far."""
        with _quickly():
            numbers = [number for name, each in self._shards.items() for number in self._numbers(name, each)]
            return hash((*numbers, *self._state_writes().values())) & _BITS

    def described(self) -> dict[str, str]:
        """Return in words what was written, by name."""
        found = {}
        for name, each in self._shards.items():
            shard, gradient = self._numbers(name, each)
            found[name] = f"written to {shard} times"
            found[f"the gradient of {name}"] = {_NONE: "none", _OTHER: "another one"}.get(
                gradient, f"written to {gradient} times"
            )
        names = {id(each): name for name, each in self._shards.items()}
        for number, (writes, others) in self._state_writes().items():
            found[f"the optimizer's state of {names[number]}"] = (
                f"written to {writes} times, with {others} entries exchanged"
            )
        return found

    def _state_writes(self) -> dict[int, tuple[int, int]]:
        """Return by parameter how often its state was written to since the last step, and how many entries are there no more, or others."""
        there = {
            id(parameter): state for optimizer in self._stepped.values() for parameter, state in optimizer.state.items()
        }
        found = {}
        for number, before in self._states.items():
            now = there.get(number, {})
            since = [entry.writes_since(now.get(key)) for key, entry in before.items()]
            writes = sum(each for each in since if each is not None)
            found[number] = writes, since.count(None) + len(now.keys() - before.keys())
        return found

    def _numbers(self, name: str, parameter: Tensor) -> tuple[int, int]:
        gradient, known = parameter.grad, self._gradients.get(name)
        number = _NONE if gradient is None else _OTHER
        if gradient is not None and known is not None and known[0] is gradient:
            number = num_writes(gradient) - known[1]
        return num_writes(parameter) - self._before[name], number

    def compare(self, group: ProcessGroup | None) -> None:
        """Compare where no batch or update does, in a run or behind it. Every rank must call it.

        Communicates: one all_reduce of 16 bytes on the host.

        Raises:
            SequenceParallelError: ranks have written differently; on all of them.
        """
        of_run = bool(self._shards)
        if not comm.all_equal(torch.tensor([self.digest if of_run else comm.digest_of(self._behind())]), group):
            comm.refuse_writes(self.described() if of_run else self._behind(), group)

    def _behind(self) -> dict[str, str]:
        """Return in words what was written to the shards since their last run."""
        if (root := self._root()) is None or not self._left:
            return {}
        reshard(root)
        now = {user_name(name): num_writes(each) for name, each in root.named_parameters()}
        return {
            name: f"written to {now[name] - writes} times behind the run"
            for name, writes in self._left.items()
            if name in now
        }

    def _compare_before_update(self, mesh: SequenceMesh, group: ProcessGroup | None) -> None:
        """Raise where ranks have written differently, or where some leave the update out. Communicates: as for a batch, with which a rank that
        leaves it out goes on: messages of other sizes would end a process in gloo's native code, without a word."""
        comm.check_same_batch(
            None, digest=0, data_parallel_rank=mesh.data_parallel_rank, num_ring_passes=mesh.num_ring_passes, num_groups=mesh.data_parallel_size,
            loop={"what comes next": "an optimizer's step"}, written=comm.Written(0, self.digest, self.described), group=group,
        )  # fmt: skip


def _called_before(plugin: Any, act: Callable[[], None]) -> Callable[[], None]:
    """Call a function before the hooks behind a backward; return what undoes that."""
    own = plugin.post_backward

    def post_backward(*args: Any) -> Any:
        act()
        return own(*args)

    plugin.post_backward = post_backward

    def undo() -> None:
        vars(plugin).pop("post_backward", None)

    return undo


def _called_after(plugin: Any, act: Callable[[], None]) -> Callable[[], None]:
    """Call a function behind the hooks that come before an update; return what undoes that."""
    own = plugin._after_closure

    def after_closure(*args: Any) -> None:
        own(*args)
        act()

    plugin._after_closure = after_closure

    def undo() -> None:
        vars(plugin).pop("_after_closure", None)

    return undo


def _quickly() -> AbstractContextManager[None]:
    """Ask sharded tensors for what they are, their counts and gradients, without a call of Python for each: they are thousands in a step."""
    disabled: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return disabled


def _nothing() -> None:
    """Stand for what is to be undone where nothing is."""
