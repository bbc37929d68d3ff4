"""What the ranks of test_activation_offload run."""

from __future__ import annotations

import gc
import os
import time
import warnings
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sp.config import MemoryOptions
from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize import checkpoint_blocks, make_fsdp_root, offload_activations, shard_model
from lightning_sp.parallelize.activation_offload import ActivationOffload
from lightning_sp.parallelize.activation_offload.disk import DiskStore
from lightning_sp.parallelize.activation_offload.pinned_host import PinnedHostStore
from tests.instruments.live_storages import LiveStorages
from tests.parallelize.fsdp.gloo_collectives_ranks import mesh_of

CPU = torch.device("cpu")


class Block(nn.Module):
    """Has a mask beside its input, and what all blocks share, both by name."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, *, mask: Tensor, shared: Tensor | None = None) -> Tensor:
        inner = torch.tanh(self.up(x)) * mask
        return x + self.dropout(self.down(inner)) + (0 if shared is None else shared * x)


class Model(nn.Module):
    def __init__(self, layers: int = 5, dim: int = 8, hidden: int = 12, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.kind = nn.Linear(dim, dim), kind
        self.layers = nn.ModuleList(Block(dim, hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        shared = self.first(x) if self.kind == "shared" else None
        for layer in self.layers:
            if self.kind == "transposed":
                x = x.transpose(0, 1)
            before, x = x, layer(x, mask=torch.ones(()), shared=shared)
            if self.kind == "in place":
                before.mul_(2.0)
        return x

    training_step = forward


def model(options: dict[str, Any] | None, sharded: bool, **sizes: Any) -> tuple[Model, ActivationOffload | None]:
    """Return a model, its blocks recomputed in the backward if there are options."""
    root, offload = Model(**sizes).to(torch.bfloat16 if sizes.get("kind") == "bfloat16" else torch.float32), None
    if options is not None:
        chosen = MemoryOptions(activation_checkpointing=True, **options)
        offload = offload_activations(root, chosen, CPU, list(root.layers))
        checkpoint_blocks(root, list(root.layers), "selective", offload=offload)
    if sharded:
        shard_model(root, list(root.layers), mesh_of((dist.get_world_size(),)))
        make_fsdp_root(root)
    return root, offload


def lengths(folder: str) -> tuple[int, int, int]:
    """Return the most bytes that a file held over steps of many lengths, in one of the longest, and of a device's store how many buffers."""
    root, offload = model({"activation_offload": "disk", "offload_folder": folder}, sharded=False)
    assert offload is not None
    store = offload._store
    assert isinstance(store, DiskStore)
    found = []
    for rows in ((9,), (3, 7, 9, 5, 8, 2, 6)):
        for each in rows:
            root(torch.ones(each, 3, 8)).sum().backward()
        found.append(store.num_bytes)
        offload.close()
    simulated = PinnedHostStore(CPU, pins=False)
    for each in (3, 7, 9, 5, 8, 2, 6):
        buffers = [simulated.buffer(each) for _ in range(5)]
        assert all(buffer.numel() >= each for buffer, _ in buffers)
        for buffer, event in buffers:
            simulated.vacate(buffer, event)
    return found[1], found[0], len(simulated._free)


def gradients(root: Model, steps: int = 2, micro_batches: int = 2) -> list[Tensor]:
    """Return the gradients of steps that run several forwards before the backwards, with dropout."""
    found = []
    dtype = next(root.parameters()).dtype
    for step in range(steps):
        torch.manual_seed(step)
        losses = [
            root.training_step(torch.randn(4, 3, 8).to(dtype)).float().pow(2).mean() for _ in range(micro_batches)
        ]
        for loss in losses if step % 2 else reversed(losses):
            loss.backward()
        found += [
            (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone() for p in root.parameters()
        ]
    return found


class Residents:
    """Counts the inputs that a disk's store has in memory, after each of its steps."""

    def __init__(self, offload: ActivationOffload) -> None:
        self.most = self.num_put = 0
        self._alive: list[Any] = []
        store = offload._store
        put = store.put

        def counted(tensor: Tensor) -> Any:
            stored = put(tensor)
            self._alive.append(weakref.ref(stored))
            self.num_put += 1
            take = stored.take

            def taken() -> Tensor:
                tensor = take()
                self.look(1)
                return tensor

            stored.take = taken  # type: ignore[method-assign]
            return stored

        store.put = counted  # type: ignore[method-assign]

    def look(self, taken: int) -> None:
        stored = [each for ref in self._alive if (each := ref()) is not None]
        self.most = max(self.most, taken + sum(each._read is not None for each in stored))


def law(kind: str, horizon: int, sharded: bool, folder: str) -> dict[str, Any]:
    """Return whether gradients are bitwise those without offload, and what was put, how much was in memory, and what is left."""
    before = gradients(model({}, sharded, kind=kind)[0])
    options = dict(activation_offload="disk", activation_loading_horizon=horizon, offload_folder=folder)
    root, offload = model(options, sharded, kind=kind)
    assert offload is not None
    residents = Residents(offload)
    after = gradients(root)
    num_bytes = offload._store.num_bytes  # type: ignore[attr-defined]
    gc.collect()
    alive = len(offload._saved)
    offload.close()
    return {
        "equal": all(torch.equal(a, b) for a, b in zip(after, before, strict=True)),
        "put": residents.num_put, "most": residents.most, "alive": alive, "bytes": num_bytes, "left": os.listdir(folder),
        "threads": [name for name in map(thread_name, os.listdir("/proc/self/task")) if "activation" in name],
    }  # fmt: skip


def thread_name(number: str) -> str:
    """Return what the system calls a thread of this process; "" for one that has ended since."""
    try:
        return Path(f"/proc/self/task/{number}/comm").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def written_to(folder: str) -> str:
    """A model that changes the input of a block after it ran."""
    root, _ = model(
        dict(activation_offload="disk", activation_loading_horizon=9, offload_folder=folder), False, kind="in place"
    )
    slow = DiskStore.write

    def write(store: DiskStore, source: Tensor, place: int) -> None:
        time.sleep(0.3)
        slow(store, source, place)

    with mock.patch.object(DiskStore, "write", write):
        try:
            root(torch.ones(2, 3, 8)).sum().backward()
        except RuntimeError as error:
            return str(error)
    return "NOT REFUSED"


def leaving(folder: str, horizon: int) -> int:
    """Return how many inputs are in memory at once in a forward, on a disk that is slow."""
    root, offload = model(
        dict(activation_offload="disk", activation_loading_horizon=horizon, offload_folder=folder), False
    )
    assert offload is not None
    sources: list[Any] = []
    most = [0]
    put, write = offload._store.put, DiskStore.write

    def counted(tensor: Tensor) -> Any:
        sources.append(put(tensor))
        most[0] = max(most[0], sum(each._source is not None for each in sources))
        return sources[-1]

    def slow(store: DiskStore, source: Tensor, place: int) -> None:
        time.sleep(0.05)
        write(store, source, place)

    with mock.patch.object(DiskStore, "write", slow), mock.patch.object(offload._store, "put", counted):
        root(torch.ones(2, 3, 8))
    return most[0]


def full_disk(folder: str) -> tuple[bool, str]:
    """A disk that is full in the middle of a forward: the gradients, and what is said."""
    expected = gradients(model({}, False)[0], micro_batches=1)
    root, _ = model(dict(activation_offload="disk", offload_folder=folder, activation_loading_horizon=1), False)
    real, calls = os.pwrite, []

    def pwrite(*args: Any) -> int:
        calls.append(args)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        return real(*args)

    with mock.patch("os.pwrite", pwrite), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        actual = gradients(root, micro_batches=1)
    # Whatever else is collected meanwhile may warn, too.
    return all(map(torch.equal, actual, expected)), "\n".join(str(each.message) for each in told)


def no_room(folder: str) -> str:
    """A disk that is smaller than what the ranks need together."""
    root, offload = model(dict(activation_offload="disk", offload_folder=folder), False)
    assert offload is not None
    free = 5 * 4 * 3 * 8 * 4 + 1  # of one rank and no other
    with mock.patch("shutil.disk_usage", return_value=mock.Mock(free=free)):
        root(torch.ones(4, 3, 8))
        try:
            offload.check_room(None)
        except SequenceParallelError as error:
            return str(error)
    return "NOT REFUSED"


def no_folder(folder: str) -> str:
    """A folder that rank 1 does not have."""
    options = dict(activation_offload="disk", offload_folder=folder if dist.get_rank() == 0 else f"{folder}/absent")
    try:
        model(options, False)
    except SequenceParallelError as error:
        return str(error)
    return "NOT REFUSED"


def fails(folder: str) -> list[str]:
    """A backward that fails in the middle: what is left in the folder."""
    root, offload = model(dict(activation_offload="disk", offload_folder=folder), False)
    assert offload is not None
    out = root(torch.ones(4, 3, 8))
    root.layers[2].register_full_backward_pre_hook(lambda *_: 1 / 0)
    hooked = root(torch.ones(4, 3, 8))
    try:
        (out.sum() + hooked.sum()).backward()
    except ZeroDivisionError:
        found = os.listdir(folder)
        offload.close()
        return found + os.listdir(folder)
    return ["did not fail"]


def peak_bytes(layers: int, horizon: int | None, folder: str, tokens: int = 4096, dim: int = 128) -> int:
    """Return how many bytes of tensors a forward and backward have at once beside what is alive before; no horizon is no offload."""
    options: dict[str, Any] = {}
    if horizon is not None:
        options = dict(activation_offload="disk", activation_loading_horizon=horizon, offload_folder=folder)
    root, offload = model(options, False, layers=layers, dim=dim, hidden=dim)
    for each in root.parameters():
        each.grad = torch.zeros_like(each)
    x = torch.ones(1, tokens, dim)
    live, read = LiveStorages([x, *(t for p in root.parameters() for t in (p, p.grad))]), DiskStore.read

    def counted(store: DiskStore, target: Tensor, place: int) -> None:
        live.count(target)  # made by the store's thread
        read(store, target, place)

    with mock.patch.object(DiskStore, "read", counted), live:
        root(x).sum().backward()
    if offload is not None:
        offload.close()
    return live.peak_bytes
