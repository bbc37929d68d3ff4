"""Recipes: how the bytes of a tensor came about, so that they can be made once more, alone, when they are needed.

    w = torch.empty(4, 4)      version 0     a call, whose first output it is
    w.uniform_()               version 1     a call that writes to version 0, with the state of the generator before it
    w[0].zero_()               version 2     a call that writes to version 1

A version is the contents of one storage; a view is a tensor that looks at them. What a call reads are views of the versions of that time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_sp.errors import SequenceParallelError

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False, kw_only=True)
class Geometry:
    """Where in a storage a tensor's elements are."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        """Return where a tensor's elements are."""
        return cls(
            size=tuple(tensor.size()), stride=tensor.stride(), offset=int(tensor.storage_offset()), dtype=tensor.dtype
        )

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor that looks at them."""
        return torch.empty(0, dtype=self.dtype, device=CPU).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, eq=False, kw_only=True)
class Call:
    """A function of torch that was called, with `View` and `Held` in the place of tensors.

    Args:
        function: an operator, or what reads a tensor from a file.
        args: positional arguments.
        kwargs: keyword arguments.
        random: whether it draws.
        generator_state: of the generator that it drew from, before it did; None where this rank does not draw.
        default_dtype: torch's at that time.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: bool = False
    generator_state: Tensor | None = None
    default_dtype: torch.dtype = torch.float32


@dataclass(frozen=True, eq=False, kw_only=True)
class Version:
    """The contents of one storage after a call.

    Args:
        call: which has made them, or written to them.
        previous: the contents that it has written to; None for those that it has made.
        output: which of its outputs they are, where it has made them.
        num_bytes: of the storage.
        made: where in the storage that output is.
    """

    call: Call
    num_bytes: int
    previous: Version | None = None
    output: int = 0
    made: Geometry | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class View:
    """A tensor of which the recipe is known."""

    version: Version
    geometry: Geometry


@dataclass(eq=False)
class Held:
    """A tensor with values that a call reads: a copy of a small one, the user's own of a large one."""

    tensor: Tensor
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = self.tensor._version

    def copy(self) -> None:
        """Have the values as they are, for the user is about to write to them."""
        self.__init__(self.tensor.detach().clone())  # type: ignore[misc]

    def read(self) -> Tensor:
        """Return the tensor.

        Raises:
            SequenceParallelError: it was written to.
        """
        if self.tensor._version != self.version:
            raise SequenceParallelError(
                f"a tensor {tuple(self.tensor.shape)} that configure_model copied into a parameter was written to after configure_model had "
                "ended, and before the parameters were made: write to a clone of it, or give delayed_init=False"
            )
        return self.tensor


def empty_version(num_bytes: int) -> Version:
    """Return memory that nobody has written to."""
    call = Call(
        function=torch.ops.aten.empty.memory_format, args=([num_bytes],), kwargs={"dtype": torch.uint8, "device": CPU}
    )
    made = Geometry(size=(num_bytes,), stride=(1,), offset=0, dtype=torch.uint8)
    return Version(call=call, num_bytes=num_bytes, made=made)


def written_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to, as its schema says."""
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    found: list[Any] = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(given) if isinstance(leaf, (Tensor, View))]
    return found


def generator_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator | None:
    """Return the generator that a call was given, None where it draws from torch's own."""
    return next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Generator)), None)


def make(view: View) -> Tensor:
    """Make a tensor: its calls are run again, from the states of the generator at their time; the generators stay as they are.

    Raises:
        SequenceParallelError: it depends on numbers that rank 0 alone has drawn.
    """
    return _Replay().tensor(view)


class _Replay:
    """Calls run again; a class because what they share (the factors of one decomposition) is run once and freed together."""

    def __init__(self) -> None:
        self._contents: dict[Version, torch.UntypedStorage] = {}
        self._outputs: dict[Call, list[Tensor]] = {}

    def tensor(self, view: View) -> Tensor:
        return view.geometry.on(self._storage(view.version))

    def _storage(self, version: Version) -> torch.UntypedStorage:
        """Return the contents, not to be written to."""
        writes: list[Version] = []
        at: Version | None = version
        while at is not None and at not in self._contents:
            writes.append(at)
            at = at.previous
        storage: torch.UntypedStorage | None = None if at is None else self._contents[at].clone()  # type: ignore[no-untyped-call]
        for each in reversed(writes):
            if each.previous is None:
                storage = self._made(each)
            else:
                assert storage is not None
                self._run(each.call, each.previous, storage)
        assert storage is not None
        self._contents[version] = storage
        return storage

    def _made(self, version: Version) -> torch.UntypedStorage:
        """Return an output of a call in memory of its own, laid out as it was recorded."""
        call, made = version.call, version.made
        assert made is not None
        outputs = self._outputs.pop(call, None)
        outputs = self._run(call) if outputs is None else outputs
        if len(outputs) > 1:
            self._outputs[call] = outputs  # the others are asked for next
        tensor, storage = outputs[version.output], outputs[version.output].untyped_storage()
        as_recorded = (tensor.stride(), tensor.storage_offset(), storage.nbytes()) == (
            made.stride,
            made.offset,
            version.num_bytes,
        )
        if len(outputs) > 1 or not as_recorded:
            storage = torch.UntypedStorage(version.num_bytes, device=CPU)  # type: ignore[no-untyped-call]
            made.on(storage).copy_(tensor)
        return storage

    def _run(
        self, call: Call, previous: Version | None = None, storage: torch.UntypedStorage | None = None
    ) -> list[Tensor]:
        """Run a call; what is of the version `previous` it finds, and writes to, in `storage`."""
        written = written_arguments(call.function, call.args, call.kwargs)

        def argument(leaf: Any) -> Any:
            if isinstance(leaf, Held):
                return leaf.read()
            if not isinstance(leaf, View):
                return leaf
            if leaf.version is previous and storage is not None:
                return leaf.geometry.on(storage)
            tensor = self.tensor(leaf)
            return tensor.clone() if any(leaf is each for each in written) else tensor

        with torch.no_grad(), _as_then(call) as generator:
            args, kwargs = tree_map(argument, (call.args, call.kwargs))
            if generator is not None:
                args, kwargs = tree_map(lambda leaf: generator if isinstance(leaf, Generator) else leaf, (args, kwargs))
            output = call.function(*args, **kwargs)
        return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


@contextmanager
def _as_then(call: Call) -> Iterator[Generator | None]:
    """Have torch's default dtype and its generator as at the time of a call; give what stands for a generator of the user's."""
    dtype, own, given = torch.get_default_dtype(), None, generator_of(call.args, call.kwargs)
    if call.random and call.generator_state is None:
        raise SequenceParallelError(
            "configure_model looks at numbers that it has drawn, and rank 0 alone draws them: draw them in __init__ from a seed, or build the "
            "model in __init__"
        )
    before = torch.get_rng_state() if call.random and given is None else None
    try:
        torch.set_default_dtype(call.default_dtype)
        if call.generator_state is not None:
            if given is None:
                torch.set_rng_state(call.generator_state)
            else:
                own = Generator()
                own.set_state(call.generator_state)
        yield own
    finally:
        torch.set_default_dtype(dtype)
        if before is not None:
            torch.set_rng_state(before)
