"""One rank of a large world, without the machines: what the host does in a step of training, counted.

    python -m benchmarks.steps.scale                          the table: worlds of 8 to 1,024 ranks
    python -m benchmarks.steps.scale step --size 64 ...      one world, in detail: each wait, copy and collective with its line

A world is torch's fake process group, a device is simulated (`simulated_device`): nothing is computed, all of Lightning, FSDP2 and this
package runs. Milliseconds are of this package's own lines but those of its models, by cProfile, which slows them down: the sum of each
function's median over the counted steps, for another process may take the core in one of them.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import logging
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, Dataset

from benchmarks.instruments.own_seconds import own_seconds, profiler_costs
from benchmarks.instruments.simulated_device import KINDS, NAME, SimulatedDevice, register
from lightning_sp import SequenceParallelStrategy
from lightning_sp.attention import operator
from lightning_sp.models.llama import Llama, LlamaConfig

# Llama 3 8B; its depth is an argument, for what a layer costs is the difference between two depths.
LLAMA = dict(vocab_size=128_256, dim=4096, num_heads=32, num_kv_heads=8, hidden_dim=14_336)
WARMUP_STEPS, COUNTED_STEPS = 2, 7


@dataclass(frozen=True, kw_only=True)
class World:
    """A world of which one rank is run.

    Args:
        size: ranks.
        rank: of this one.
        ulysses: degree.
        ring: degree.
        layers: of the model.
        tokens: of a sequence.
        documents: packed into a sequence; 1 is a whole one.
        transformers: whether the model is that of transformers.
        plants: whether the user's step makes a wait of each kind.
        host: whether shards and the inputs of recomputed blocks are in the host's memory.
        global_view: whether the step sees whole sequences.
    """

    size: int = 8
    rank: int = 0
    ulysses: int = 4
    ring: int = 2
    layers: int = 2
    tokens: int = 4096
    documents: int = 1
    transformers: bool = False
    plants: bool = False
    host: bool = False
    global_view: bool = False


class _Device(Accelerator):
    """The simulated device, for Lightning."""

    def setup_device(self, device: torch.device) -> None: ...

    def teardown(self) -> None: ...

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(devices))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [register()] * len(devices)

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}


class _Environment(LightningEnvironment):
    """The place of one rank."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return self._world.size

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return self._world.rank

    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return 0


class _Sequences(Dataset[dict[str, Tensor]]):
    """Random tokens, in documents of equal length."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __len__(self) -> int:
        return (WARMUP_STEPS + COUNTED_STEPS + 1) * self._world.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        world = self._world
        row = torch.randint(0, 256, (world.tokens + 1,), generator=torch.Generator().manual_seed(index))
        positions = torch.arange(world.tokens) % -(-world.tokens // world.documents)
        return {"input_ids": row[:-1], "shift_labels": row[1:], "position_ids": positions}


class _User(pl.LightningModule):
    """What a user writes."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        # The weights are on the device from the start: host memory for them there is none. Nor can they be cast, having no data.
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(register()):
                self.model = _model(self._world)
        finally:
            torch.set_default_dtype(before)

    def _apply(self, fn: Any, recurse: bool = True) -> _User:
        return self  # they have no data that could be moved

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
        logits = logits if isinstance(logits, Tensor) else logits.logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["shift_labels"].flatten())
        if self._world.plants:
            _make_waits(loss.detach())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def _model(world: World) -> torch.nn.Module:
    if not world.transformers:
        return Llama(LlamaConfig(num_layers=world.layers, **LLAMA))
    import transformers  # noqa: PLC0415

    config = transformers.LlamaConfig(
        vocab_size=LLAMA["vocab_size"], hidden_size=LLAMA["dim"], num_hidden_layers=world.layers, intermediate_size=LLAMA["hidden_dim"],
        num_attention_heads=LLAMA["num_heads"], num_key_value_heads=LLAMA["num_kv_heads"], use_cache=False,
    )  # fmt: skip
    model: torch.nn.Module = transformers.LlamaForCausalLM(config)
    return model


def _make_waits(loss: Tensor) -> None:
    loss.item()
    loss.view(1).nonzero()
    loss.view(1)[loss.view(1) > 0]
    torch.equal(loss, loss)
    loss.cpu()
    torch.ones(1).to(loss.device)
    torch.get_device_module(loss.device).synchronize()
    torch.get_device_module(loss.device).current_stream().synchronize()


class _Counted(pl.Callback):
    """Notes what happens between the first counted step and the last."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        # Each of a step, by the clock that is read fastest, its own.
        self.profiles: list[cProfile.Profile] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.profiles:
            self.profiles[-1].disable()
            gc.enable()
        self._device.noting = WARMUP_STEPS <= trainer.global_step < WARMUP_STEPS + COUNTED_STEPS
        if self._device.noting:
            self.profiles.append(cProfile.Profile())
            gc.collect()
            gc.disable()  # what the simulated device leaves is collected in the line that comes next
            self.profiles[-1].enable()


@contextmanager
def _without_data() -> Iterator[None]:
    """Leave out what needs a rank's weights or its peers before the first step."""
    unchanged: Any = lambda *_, **__: None  # noqa: E731
    with (
        mock.patch("lightning_sp.step.meshes.check_parameters", unchanged),
        mock.patch("lightning_sp.mesh.set_world_timeout", unchanged),
        mock.patch("lightning_sp.comm.groups.set_world_timeout", unchanged),
        mock.patch("lightning_sp.step.prepare.whole_state", return_value={}),
        mock.patch("lightning_sp.step.prepare.broadcast_initial_weights", unchanged),
        # A loss of tensors without data is torch's own there: Dynamo asks for its shape.
        mock.patch("lightning_sp.loss.interception.FakeTensor", type("NoTensor", (), {})),
        # Nor are they those of a compiler, for which collectives are operators.
        mock.patch("lightning_sp.comm.operators.FakeTensor", type("NoTensor", (), {})),
    ):
        yield


def count(world: World) -> dict[str, Any]:
    """Return what one rank does in a step: counts, each with its line, and milliseconds. One world size a process."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    bodies = (operator.attention_op, operator.attention_backward_op, operator.exchange_gradients_op)
    device = SimulatedDevice({each._opoverload._schema.name: each._init_fn for each in bodies})
    # The name of the backend for host tensors and for those of the device.
    backend = f"cpu:fake,{NAME}:fake"
    if not dist.is_initialized():
        dist.init_process_group(backend, rank=world.rank, world_size=world.size, store=FakeStore())
    counted = _Counted(device)
    strategy = SequenceParallelStrategy(
        ulysses_size=world.ulysses, ring_size=world.ring, preflight=False, process_group_backend=backend, packed_documents=world.documents > 1,
        cpu_offload=world.host, activation_checkpointing=world.host, activation_offload="host" if world.host else "none",
        activation_loading_horizon=2 if world.host else 4, global_view=world.global_view,
    )  # fmt: skip
    trainer = pl.Trainer(
        accelerator=_Device(), devices=1, num_nodes=world.size, strategy=strategy, plugins=[_Environment(world)], logger=False,
        max_steps=WARMUP_STEPS + COUNTED_STEPS + 1, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[counted],
    )  # fmt: skip
    # The backward runs in this thread, whose lines are measured.
    with _without_data(), device, torch.autograd.set_multithreading_enabled(False):
        costs = profiler_costs(lambda: torch.empty(2, 4, device=register()))
        trainer.fit(_User(world), DataLoader(_Sequences(world), batch_size=1))
    lines = Counter((note.kind, note.what, note.where) for note in device.notes)
    groups = Counter((note.kind, note.group, note.what) for note in device.notes if "collective" in note.kind)
    return {
        "world": asdict(world),
        "ms": sum(own_seconds(counted.profiles, _is_measured, costs).values()) * 1e3,
        "bytes": sum(note.num_bytes for note in device.notes if note.kind == "device collective") / COUNTED_STEPS,
        "launches": {where: n / COUNTED_STEPS for where, n in device.launches.most_common()},
        "counts": {kind: sum(each.kind == kind for each in device.notes) / COUNTED_STEPS for kind in KINDS},
        "lines": [[n / COUNTED_STEPS, *line] for line, n in sorted(lines.items(), key=lambda item: (item[0][0], -item[1]))],
        "groups": [[n / COUNTED_STEPS, *line] for line, n in sorted(groups.items())],
    }  # fmt: skip


def _is_measured(file: str) -> bool:
    return "/lightning_sp/" in file and not any(f"/lightning_sp/{part}/" in file for part in ("models", "attention"))


def _in_a_process(**options: Any) -> dict[str, Any]:
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.steps.scale", "step", "--json", *arguments], capture_output=True, text=True, check=False
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{arguments}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


TABLE = [
    dict(size=8, ulysses=8, ring=1, tokens=262_144),
    dict(size=64, ulysses=8, ring=8, tokens=1_048_576),
    dict(size=512, ulysses=8, ring=8, tokens=1_048_576),
    dict(size=1024, ulysses=8, ring=16, tokens=1_048_576),
    dict(size=1024, ulysses=8, ring=16, tokens=1_048_576, documents=500),
]


def table() -> None:
    """Print counts and milliseconds of each world, with what a layer costs."""
    print(
        "| world | ulysses x ring | documents | ms a step, 2 layers | ms a layer | "
        + " | ".join(KINDS)
        + " | MB of collectives |"
    )
    print("|---|---|---|---|---|" + "---|" * (len(KINDS) + 1))
    for options in TABLE:
        shallow, deep = (_in_a_process(**options, layers=layers) for layers in (2, 6))
        counts = " | ".join(
            f"{shallow['counts'][k]:g} + {(deep['counts'][k] - shallow['counts'][k]) / 4:g} a layer" for k in KINDS
        )
        print(
            f"| {options['size']} | {options['ulysses']} x {options['ring']} | {options.get('documents', 1)} | {shallow['ms']:.1f} | "
            f"{(deep['ms'] - shallow['ms']) / 4:.2f} | {counts} | {shallow['bytes'] / 1e6:.0f} |",
            flush=True,
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    step = commands.add_parser("step", help="one world")
    step.add_argument("--json", action="store_true", help="print JSON")
    for name, value in asdict(World()).items():
        step.add_argument(f"--{name}", type=int, default=int(value))
    given = vars(parser.parse_args())
    if given.pop("command") is None:
        table()
        return
    as_json = given.pop("json")
    found = count(World(**{name: type(getattr(World(), name))(value) for name, value in given.items()}))
    if as_json:
        print(json.dumps(found))
        return
    print(f"{found['ms']:.1f} ms of the package's own lines a step; a step has:")
    for number, kind, what, where in found["lines"]:
        print(f"{number:6g}  {kind:18}  {what:28}  {where}")
    print("by group:")
    for number, kind, group, what in found["groups"]:
        print(f"{number:6g}  {kind:18}  {what:28}  {group}")


if __name__ == "__main__":
    main()
