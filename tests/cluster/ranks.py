"""What each rank of a cluster runs: `python -m tests.cluster.ranks FOLDER '[["name", {...}], ...]'`, its answers in FOLDER/rank.json."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from benchmarks.traffic import ring_options
from lightning_sp.attention import AttentionMask, sequence_parallel_attention
from lightning_sp.layout import shard
from lightning_sp.mesh import SequenceMesh, build_device_mesh
from tests.cluster.crossing import Sent
from tests.golden.ranks import train
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama


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
        before = _settled()
        run()
        payloads.append(_settled().payload_since(before))
    return {"payloads": payloads, "no_shared_memory": run.mesh.no_shared_memory, "node": os.uname().nodename}


def _settled() -> Sent:
    """Read the link's counters where nothing is on its way: what this rank and its neighbours sent has left."""
    dist.barrier()
    sent = Sent.now()
    while (now := _later()) != sent:
        sent = now
    dist.barrier()
    return sent


def _later() -> Sent:
    time.sleep(0.1)
    return Sent.now()


def timed(repeats: int, **attention: Any) -> dict[str, Any]:
    """Return the median seconds of a pass."""
    run = _Attention(**attention)
    run()
    return {"seconds": statistics.median(run() for _ in range(repeats))}


class _Endless(Plain):
    """Says in a file that a step has ended, so that whoever watches may end a node then."""

    def __init__(self, said: Path) -> None:
        super().__init__(tiny_llama)
        self.said = said

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.is_global_zero and self.trainer.global_step == 3:
            self.said.touch()


def endless(num_nodes: int, strategy: dict[str, Any], said: str) -> None:
    """Train until a node is lost."""
    trainer = quiet_trainer(1, strategy=strategy, num_nodes=num_nodes, max_epochs=-1)
    trainer.fit(_Endless(Path(said)), DataLoader(TokenDataset(4), batch_size=2))


FUNCTIONS = {each.__name__: each for each in (golden, crossed, timed, endless)}


def main() -> None:
    folder, calls = Path(sys.argv[1]), json.loads(sys.argv[2])
    warnings.filterwarnings("ignore")
    results = [FUNCTIONS[name](**options) for name, options in calls]
    # By rename: whoever sees it sees it whole.
    written = folder / f"{dist.get_rank()}.part"
    written.write_text(json.dumps(results))
    written.rename(folder / f"{dist.get_rank()}.json")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
