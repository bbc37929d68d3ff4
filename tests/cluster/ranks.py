"""What each rank of a cluster runs: `python -m tests.cluster.ranks FOLDER '[["name", {...}], ...]'`, its answers in FOLDER/rank.json."""

from __future__ import annotations

import faulthandler
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from benchmarks.instruments.traffic import ring_options
from lightning_sp.attention import AttentionMask, sequence_parallel_attention
from lightning_sp.layout import shard
from lightning_sp.mesh import SequenceMesh, build_device_mesh
from tests.cluster.crossing import Sent, sent_in_messages
from tests.cluster.nodes import START_S, shape_commands
from tests.golden.ranks import train
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama

T = TypeVar("T")


def golden(layout: list[int], num_nodes: int, **options: Any) -> dict[str, Any]:
    """Train the golden run."""
    return train(tuple(layout), num_nodes=num_nodes, **options)


def _mesh(ulysses: int, ring: int) -> SequenceMesh:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    size = ulysses * ring
    base = build_device_mesh("cpu", data_parallel_size=dist.get_world_size() // size, sequence_parallel_size=size)
    return SequenceMesh.build(base, ring_size=ring, ulysses_size=ulysses)


class _Attention:
    """One attention's forward and backward on this rank's part of a sequence, to be run again and again."""

    def __init__(
        self, ulysses: int, ring: int, heads: int, kv_heads: int, length: int, dim: int, causal: bool, dtype: str
    ) -> None:
        self.mesh, self._mask = _mesh(ulysses, ring), AttentionMask(causal)
        generator = torch.Generator().manual_seed(0)
        shapes = [
            (1, heads, length, dim),
            (1, kv_heads, length, dim),
            (1, kv_heads, length, dim),
            (1, heads, length, dim),
        ]
        whole = [torch.randn(shape, generator=generator, dtype=getattr(torch, dtype)) for shape in shapes]
        q, k, v, self._grad = (shard(t, self.mesh.layout, self.mesh.sequence_rank, dim=2) for t in whole)
        self._leaves = [t.requires_grad_(True) for t in (q, k, v)]

    def __call__(self) -> float:
        """Return the seconds of a pass that all ranks begin together."""
        dist.barrier()
        began = time.perf_counter()
        options = ring_options("auto", "hops")
        out = sequence_parallel_attention(*self._leaves, mesh=self.mesh, mask=self._mask, **options)
        out.backward(self._grad)
        dist.barrier()
        return time.perf_counter() - began


def crossed(lengths: list[int], **attention: Any) -> dict[str, Any]:
    """Return what leaves this rank's node in a pass of each length, once everything is connected."""
    payloads = []
    for length in lengths:
        run = _Attention(length=length, dtype="float64", **attention)
        run()
        before = _settled(Sent.now)
        run()
        payloads.append(_settled(Sent.now).payload_since(before))
    return {"payloads": payloads, "no_shared_memory": run.mesh.no_shared_memory, "node": os.uname().nodename}


def _settled(read: Callable[[], T]) -> T:
    """Return what a reading gives where nothing is on its way: what this rank and its neighbours sent has left."""
    dist.barrier()
    found = read()
    while (now := _later(read)) != found:
        found = now
    dist.barrier()
    return found


def _later(read: Callable[[], T]) -> T:
    time.sleep(0.1)
    return read()


def timed(rates_mbit: list[float], repeats: int, **attention: Any) -> dict[str, Any]:
    """Return the median seconds of a pass at each rate of the links; one rank a node."""
    run, seconds = _Attention(**attention), []
    for rate in rates_mbit:
        for command in shape_commands(rate):
            subprocess.run(command, check=True)
        run()
        seconds.append(statistics.median(run() for _ in range(repeats)))
    return {"seconds": seconds}


class _Endless(Plain):
    """Says in a file when a node may be lost: after some steps, or within the preflight."""

    def __init__(self, said: Path, in_preflight: bool) -> None:
        super().__init__(tiny_llama)
        self._said, self._in_preflight = said, in_preflight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self._in_preflight:
            self._said.touch()
            time.sleep(2)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 3:
            self._said.touch()


def endless(num_nodes: int, devices: int, strategy: dict[str, Any], said: str, in_preflight: bool = False) -> None:
    """Train until a node is lost."""
    options = {"num_nodes": num_nodes, "max_epochs": -1, "strategy": {"preflight": in_preflight, **strategy}}
    module = _Endless(Path(said), in_preflight)
    quiet_trainer(devices, **options).fit(module, DataLoader(TokenDataset(4), batch_size=2))


def endless_attention(said: str, timeout_s: float, **attention: Any) -> None:
    """Pass keys round until a node is lost."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    run = _Attention(**attention)
    while True:
        run()
        Path(said).touch()


def crossed_in_training(lengths: list[int], strategy: dict[str, Any]) -> dict[str, Any]:
    """Return what leaves this rank's node in two training steps on rows of each length, the first step left out.

    Without words in the store, where a rank looks every other second: two runs take other times.
    """
    found = []
    for length in lengths:
        num_nodes = dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"])
        options = {"num_nodes": num_nodes, "max_steps": 3, "strategy": {"preflight": False, **strategy}}
        counted = _Counted(tiny_llama)
        trainer = quiet_trainer(int(os.environ["LOCAL_WORLD_SIZE"]), **options)
        trainer.fit(counted, DataLoader(TokenDataset(6, length), batch_size=2))
        (before, frames_before), (after, frames) = counted.read
        found.append(after - before)
    return {"payloads": found, "frames": frames - frames_before}


class _Counted(Plain):
    """Reads what its node has sent in messages, and its link's frames, when the first step has ended, and the last."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.read: list[tuple[int, int]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step in (1, self.trainer.max_steps):
            self.read.append(_settled_messages())


def _settled_messages() -> tuple[int, int]:
    port = int(os.environ["MASTER_PORT"])
    return _settled(lambda: sent_in_messages(port)), Sent.now().frames


FUNCTIONS = {each.__name__: each for each in (golden, crossed, crossed_in_training, timed, endless, endless_attention)}


def main() -> None:
    folder, calls = Path(sys.argv[1]), json.loads(sys.argv[2])
    warnings.filterwarnings("ignore")
    # Shortly before the test gives up: where each thread stands says what it waits for.
    faulthandler.dump_traceback_later(START_S - 40)
    try:
        results = [FUNCTIONS[name](**options) for name, options in calls]
    except Exception:
        (folder / f"failed.{os.getpid()}.{os.uname().nodename}").write_text(str(time.time()))
        raise
    # By rename: whoever sees it sees it whole.
    written = folder / f"{dist.get_rank()}.part"
    written.write_text(json.dumps(results))
    written.rename(folder / f"{dist.get_rank()}.json")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
