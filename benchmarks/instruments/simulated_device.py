"""A device without a machine: tensors on it have shapes and no data, and what makes the host wait for it is noted.

    with SimulatedDevice(operators) as device:        every torch call goes through it
        Trainer(accelerator=..., strategy=...).fit(module)
    device.notes                                      waits, copies and collectives, with the line of the package that asked

torch's experimental Python backend gives the device its name (`torch.utils.backend_registration`), `FakeTensorMode` its shapes. Host tensors
are real. Values read from the device are made up: zeros, and True in copies.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAME = "simulated"
WAIT, COPY, DEVICE_COLLECTIVE, HOST_COLLECTIVE = "host wait", "copy", "device collective", "host collective"
KINDS = (WAIT, COPY, DEVICE_COLLECTIVE, HOST_COLLECTIVE)
_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)
_NO_KERNEL = ("empty", "new_empty", "detach", "set_", "resize", "_unsafe_view", "record_stream")
_SHAPE_OF_VALUES = ("nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim")
_aten = torch.ops.aten


@dataclass(frozen=True)
class Note:
    """One thing that the host did: its kind, what it was, how many bytes, the innermost line of the package, or of Lightning, and the group."""

    kind: str
    what: str
    num_bytes: int
    where: str
    group: str = ""


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None:
        _note(WAIT, "Stream.synchronize")


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _note(WAIT, "Event.synchronize")


class _Runtime(backend_registration._DummyBackendModule):
    """What `torch.cuda` is for CUDA."""

    Stream, Event = _Stream, _Event

    def current_stream(self, _: Any = None) -> _Stream:
        return _Stream()

    def stream(self, stream: Any) -> Any:
        return stream or _Stream()

    def device(self, _: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def set_device(self, _: Any) -> None: ...

    def manual_seed(self, _: int) -> None: ...

    def get_rng_state(self, *_: Any) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, *_: Any) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, *_: Any) -> None:
        _note(WAIT, "synchronize")


_running: list[SimulatedDevice] = []


def _note(kind: str, what: str, num_bytes: int = 0, group: str = "") -> None:
    if _running and _running[-1].noting:
        _running[-1].notes.append(Note(kind, what, num_bytes, _where(), group))


def _where() -> str:
    """Return the innermost line of the package that is being run, else of Lightning, else of anything."""
    found: dict[str, str] = {}
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        for part in ("/lightning_sp/", "/lightning/"):
            if part in name:
                found.setdefault(part, f"{name.rpartition(part)[2]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return found.get("/lightning_sp/") or f"Lightning's {found.get('/lightning/', 'caller')}"


def register() -> torch.device:
    """Give torch the device, once a process."""
    if not hasattr(torch, NAME):
        backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Runtime())
        torch._C._set_only_lift_cpu_tensors(True)  # else torch.tensor(0.0, device=...) asks the device for memory
    return torch.device(NAME, 0)


class SimulatedDevice(TorchDispatchMode):
    """Runs what is on the device without data, and notes what the host does for it; a class because torch calls it.

    Args:
        operators: of the package, by their names with the namespace: what each runs, for its own steps are to be seen.
    """

    def __init__(self, operators: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        self.device = register()
        self.noting = False
        self.notes: list[Note] = []
        self.launches: Counter[str] = Counter()  # of kernels that compute or copy on the device, by the line that asked
        self._operators = operators
        self._shapes = FakeTensorMode(allow_non_fake_inputs=True)
        self._done: Any = None

    def __enter__(self) -> SimulatedDevice:
        _running.append(self)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _running.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(type(each) not in _PLAIN for each in tensors):
            return NotImplemented  # a DTensor: its local tensors come back here
        if (body := self._operators.get(func._schema.name)) is not None:
            with self:
                return body(*args, **kwargs)
        if func.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        ):
            with self:  # within an operator functions arrive that are made of others
                return func.decompose(*args, **kwargs)
        here = [each for each in tensors if isinstance(each, FakeTensor)]
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs, here)
        target = kwargs.get("device")
        target = None if target is None else torch.device(target).type
        if not here and target != NAME:
            return func(*args, **kwargs)
        if here and (read := self._read(func, args, kwargs, target)) is not None:
            return read[0]
        if target == NAME and not here and func is _aten._to_copy.default:
            _note(*_copy(kwargs.get("non_blocking"), "to the device", args[0]))
            with self._shapes:
                dtype = kwargs.get("dtype") or args[0].dtype
                return torch.empty_strided(args[0].shape, args[0].stride(), dtype=dtype, device=self.device)
        if self.noting and not (func.is_view or func._schema.name.partition("::")[2].startswith(_NO_KERNEL)):
            self.launches[_where()] += 1
        with self._shapes:
            return func(*args, **kwargs)

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: str | None) -> tuple[Any] | None:
        """Return what the host gets of values on the device; None where it asks for none."""
        name = func._schema.name.partition("::")[2]
        if name in ("equal", "is_nonzero"):
            _note(WAIT, name)
            return (True,)
        if name == "_local_scalar_dense":
            _note(WAIT, name)
            return (torch.zeros((), dtype=args[0].dtype).item(),)
        if name in _SHAPE_OF_VALUES or (name == "index" and any(_is_choice(each) for each in args[1])):
            _note(WAIT, name)
            return (self._one_of(name, args),)
        if name == "_to_copy" and target == "cpu":
            _note(*_copy(kwargs.get("non_blocking"), "to the host", args[0]))
            dtype = kwargs.get("dtype") or args[0].dtype
            return (torch.full(args[0].shape, dtype == torch.bool, dtype=dtype),)
        if name == "copy_" and isinstance(args[0], FakeTensor) != isinstance(args[1], FakeTensor):
            to = "to the device" if isinstance(args[0], FakeTensor) else "to the host"
            _note(*_copy(args[2] if len(args) > 2 else kwargs.get("non_blocking"), to, args[1]))
            return (args[0] if isinstance(args[0], FakeTensor) else args[0].zero_(),)
        return None

    def _one_of(self, name: str, args: tuple[Any, ...]) -> Any:
        """Return what one chosen element gives."""
        tensor = args[0]
        with self._shapes:
            if name == "nonzero":
                return torch.zeros((1, tensor.dim()), dtype=torch.long, device=self.device)
            if name == "index":
                return tensor.new_zeros((1, *tensor.shape[args[1][0].dim() :]))
            one = tensor.new_zeros((1,))
            return one if name == "masked_select" else (one, one.long(), one.long())

    def _collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], here: list[Tensor]) -> Any:
        name = func._schema.name.partition("::")[2].strip("_")
        num_bytes = sum(each.numel() * each.element_size() for each in here)
        if not here:
            result = func(*args, **kwargs)
            if isinstance(result, tuple):
                self._done = result[-1]
            _note(HOST_COLLECTIVE, name, group=_group(args))
            return result
        _note(DEVICE_COLLECTIVE, name, num_bytes, _group(args))
        if self._done is None:
            noting, self.noting = self.noting, False
            with self:
                dist.all_reduce(torch.zeros(1))  # a finished work of torch's, which an operator has to return
            self.noting = noting
        return self._done if len(func._schema.returns) == 1 else (args[0], self._done)


def _group(args: tuple[Any, ...]) -> str:
    """Return what the group of a collective's arguments is for."""
    groups = [each for each in args if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type())]
    return str(dist.ProcessGroup.unbox(groups[0]).group_desc) if groups else ""


def _copy(non_blocking: Any, way: str, tensor: Tensor) -> tuple[str, str, int]:
    kind, what = (COPY, f"copy {way}") if non_blocking else (WAIT, f"blocking copy {way}")
    return kind, what, tensor.numel() * tensor.element_size()


def _is_choice(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
