"""`Recorder`: while a model is built, its large tensors have no memory. What is called on them is noted, to be run again one tensor at a time.

To the user's code they are tensors of the host (torch's fake tensors): shapes, views, ties and dtypes are those of real ones. Numbers that a
step of the construction draws are drawn at once, into memory that is freed again, so that the generator is where it would be. A value that is
looked at (`item`, `torch.equal`) is made for it. What makes new values whose shape depends on values is run on made inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.delayed_init.recipes import (
    CPU,
    Call,
    Geometry,
    Held,
    Version,
    View,
    empty_version,
    generator_of,
    make,
    written_arguments,
)

# Smaller tensors are real: norms, biases, tables of frequencies. A recipe of numbers that are drawn holds 5 KiB, the generator's state.
MIN_BYTES = 1 << 16
# The attribute of a fake tensor that lives as long as it. A reference to the tensor itself, a weak one too, would keep `module.to(dtype)`
# from working.
_ALIVE = "_lightning_sp_alive"
_aten = torch.ops.aten
_LIKE = {
    _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like, _aten.randint_like,
    _aten.new_empty, _aten.new_empty_strided, _aten.new_zeros, _aten.new_ones, _aten.new_full,
}  # fmt: skip
_NEW = _LIKE | {
    _aten.empty, _aten.empty_strided, _aten.zeros, _aten.ones, _aten.full, _aten.rand, _aten.randn, _aten.randint, _aten.randperm,
    _aten.normal, _aten.arange, _aten.linspace, _aten.eye,
}  # fmt: skip
# How much these draw depends on the shape alone.
_FILLS = {
    _aten.normal_, _aten.uniform_, _aten.random_, _aten.exponential_, _aten.log_normal_, _aten.cauchy_, _aten.geometric_,
    _aten.rand_like, _aten.randn_like, _aten.randint_like,
}  # fmt: skip
# What was in all of the memory that one of these writes to is lost.
_OVERWRITE = {
    _aten.normal_, _aten.uniform_, _aten.random_, _aten.exponential_, _aten.log_normal_, _aten.cauchy_, _aten.geometric_,
    _aten.zero_, _aten.fill_, _aten.copy_,
}  # fmt: skip
_WITHOUT_A_SHAPE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class _Alive:
    """Is among those that are alive, as long as something refers to it."""

    def __init__(self, among: WeakSet[_Alive]) -> None:
        self._among = among
        among.add(self)

    def __deepcopy__(self, memo: Any) -> _Alive:
        """Return another, for a tensor that is copied."""
        return _Alive(self._among)


class _FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A copy of a fake tensor is of the same mode."""

    def __deepcopy__(self, memo: Any) -> _FakeMode:
        """Return itself."""
        return self


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes how large tensors of the host come about, in place of making them.

    Args:
        draws: whether this rank draws numbers; the others have the shapes alone.
    """

    def __init__(self, *, draws: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws
        self._fake = _FakeMode(allow_non_fake_inputs=True)
        self._versions: dict[int, Version] = {}
        self._storages: list[torch.UntypedStorage] = []  # alive, so that no other gets their address
        self._held: dict[int, list[ref[Held]]] = {}
        self._alive: WeakSet[_Alive] = WeakSet()
        self._paused = False
        self.before_each: Callable[[], None] = lambda: None  # called before each operator

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let what is made within the block have memory."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    # ---- what others ask

    def is_recorded(self, tensor: object) -> bool:
        """Return whether a tensor has no memory, for its recipe is here."""
        return isinstance(tensor, FakeTensor) and _key(tensor) in self._versions

    def view(self, tensor: Tensor) -> View:
        """Return a tensor's recipe as of now."""
        return View(version=self._versions[_key(tensor)], geometry=Geometry.of(tensor))

    @property
    def num_alive(self) -> int:
        """Return how many tensors without memory somebody holds."""
        return len(self._alive)

    @property
    def own_attributes(self) -> set[str]:
        """Return the names of what torch notes on a fake tensor and on a parameter."""
        with self._fake:
            return {*vars(torch.empty(0, device=CPU)), "_is_param", _ALIVE}

    def new(self, like: Tensor, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """Return a tensor of the host that `function` will make, with the shape and dtype of one on the meta device."""
        with _disable_current_modes(), self._fake:
            tensor = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=CPU)
        self._note_outputs([tensor], Call(function=function, args=args, kwargs={}))
        return tensor

    # ---- recording

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on what has memory; note it otherwise."""
        kwargs = kwargs or {}
        self.before_each()
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(map(is_traceable_wrapper_subclass, tensors)):
            return NotImplemented  # it calls again with what it is made of
        if any(map(self.is_recorded, tensors)):
            return self._call(function, args, kwargs)
        if any(isinstance(each, FakeTensor) for each in tensors):
            return self._on_unknown(function, args, kwargs)
        if not self._paused and function.overloadpacket in _NEW and self._is_large(function, args, kwargs):
            return self._note(function, *_without_values(function, args, kwargs))
        for each in written_arguments(function, args, kwargs) if self._held else ():
            for held in self._held.pop(_key(each), []):
                if (found := held()) is not None:
                    found.copy()
        return function(*args, **kwargs)

    def _on_unknown(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on fake tensors of somebody else's, or of ours that `tensor.data = ...` has given memory."""

        def known(leaf: Any) -> Any:
            if not isinstance(leaf, FakeTensor) or leaf.fake_mode is not self._fake:
                return leaf
            if (found := real_values(leaf)) is not None:
                return found
            raise SequenceParallelError(
                f"a tensor {tuple(leaf.shape)} without memory was made where configure_model is not followed, in another thread perhaps, so "
                f"that {function} cannot be noted: build the model in one thread, or give delayed_init=False"
            )

        return function(*tree_map(known, args), **tree_map(known, kwargs))

    def _is_large(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether an operator that makes a tensor makes a large one of the host."""
        args, kwargs = _without_values(function, args, kwargs)
        if torch.device(kwargs.get("device") or CPU).type != "cpu":
            return False
        with self._fake:
            made = function(*args, **kwargs)
        return isinstance(made, Tensor) and made.layout == torch.strided and made.nbytes >= MIN_BYTES

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = written_arguments(function, args, kwargs)
        if any(not self.is_recorded(each) for each in written):
            return self._on_made(function, args, kwargs)
        try:
            with self._fake:
                elsewhere = not written and any(
                    isinstance(leaf, Tensor) and leaf.device.type != "cpu"
                    for leaf in tree_leaves(function(*args, **kwargs))
                )
        except _WITHOUT_A_SHAPE:
            if written:
                raise
            elsewhere = True
        return self._on_made(function, args, kwargs) if elsewhere else self._note(function, args, kwargs)

    def _on_made(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator now, on inputs that are made for it."""
        return function(*self._made(args), **self._made(kwargs))

    def _made(self, inputs: Any) -> Any:
        return tree_map(lambda leaf: make(self.view(leaf)) if self.is_recorded(leaf) else leaf, inputs)

    def _note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        random = torch.Tag.nondeterministic_seeded in function.tags
        state = self._drawn(function, args, kwargs) if random and self._draws else None
        written = written_arguments(function, args, kwargs)
        before = {_key(each): self._overwritten(function, each, args) for each in written}

        def noted(leaf: Any) -> Any:
            if self.is_recorded(leaf):
                return View(version=before.get(_key(leaf), self._versions[_key(leaf)]), geometry=Geometry.of(leaf))
            return self._hold(leaf) if isinstance(leaf, Tensor) else leaf

        call = Call(
            function=function,
            args=tree_map(noted, args),
            kwargs=tree_map(noted, kwargs),
            random=random,
            generator_state=state,
            default_dtype=torch.get_default_dtype(),
        )
        with self._fake:
            output = function(*args, **kwargs)
        for key, version in before.items():
            self._versions[key] = Version(call=call, previous=version, num_bytes=version.num_bytes)
        self._note_outputs([leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)], call)
        return output

    def _note_outputs(self, outputs: list[Tensor], call: Call) -> None:
        for index, each in enumerate(outputs):
            if isinstance(each, FakeTensor):
                setattr(each, _ALIVE, _Alive(self._alive))
                if _key(each) not in self._versions:
                    storage = each.untyped_storage()
                    self._storages.append(storage)
                    self._versions[_key(each)] = Version(
                        call=call, output=index, num_bytes=storage.nbytes(), made=Geometry.of(each)
                    )

    def _overwritten(self, function: Any, written: Tensor, args: tuple[Any, ...]) -> Version:
        """Return the contents that a call writes to: memory without any, where it leaves nothing of them."""
        version = self._versions[_key(written)]
        others = [leaf for leaf in tree_leaves(args[1:]) if self.is_recorded(leaf)]
        if (
            function.overloadpacket in _OVERWRITE
            and written.is_contiguous()
            and written.nbytes == version.num_bytes
            and all(_key(each) != _key(written) for each in others)
        ):
            return empty_version(version.num_bytes)
        return version

    def _drawn(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Draw what a call draws, and return the state of the generator before it."""
        generator = generator_of(args, kwargs)
        state = torch.get_rng_state() if generator is None else generator.get_state()

        def memory(leaf: Any) -> Any:
            if not self.is_recorded(leaf):
                return leaf
            return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=CPU)

        others = [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, Tensor)]
        if function.overloadpacket in _FILLS and not others:
            function(*tree_map(memory, args), **kwargs)
        else:
            self._on_made(function, args, kwargs)
        return state

    def _hold(self, tensor: Tensor) -> Held:
        """Return a tensor with values, as of now: a large one is not copied before somebody writes to it."""
        if tensor.is_meta or tensor.nbytes < MIN_BYTES:
            return Held(tensor.detach().clone())
        held = Held(tensor)  # itself: a detached one would not count what is written
        self._held.setdefault(_key(tensor), []).append(ref(held))
        return held


def real_values(tensor: Tensor) -> Tensor | None:
    """Return the plain tensor in a fake one that was given memory, None where it has none."""
    storage = tensor.untyped_storage()
    return None if storage.device.type != "cpu" else Geometry.of(tensor).on(storage)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _without_values(
    function: Any, args: Iterable[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of what makes a tensor like another: the other's shape alone, and its device."""
    args = tuple(args)
    if function.overloadpacket not in _LIKE or not isinstance(args[0], Tensor):
        return args, kwargs
    like, *others = args
    shape = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="meta")
    return (shape, *others), {**kwargs, "device": kwargs.get("device") or like.device}
