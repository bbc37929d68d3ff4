"""What interception, watch and preflight cost the default model (`conf/`) on two ranks, each called alone, over a training step.

    python -m benchmarks.steps.overhead --calls 1000

Interception is what a call of torch's function does before the attention operator, or beside torch's own cross entropy, its all_reduce of two
numbers included. The watch compares the loss of ranks that share a sequence. Each is called in the middle of a real step, so that masks,
positions and groups are those of training.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.steps.training import Clock, Tokens
from lightning_sp import SequenceParallelStrategy
from lightning_sp.loss.check import LossCheck
from lightning_sp.testing import RankPool

LAYOUTS = ({"ulysses_size": 2}, {"ring_size": 2})
CONF = Path(__file__).resolve().parents[2] / "conf"
NUM_STEPS = 6


class Timed(SequenceParallelStrategy):
    """Notes what the preflight of the first batch takes."""

    preflight_s: tuple[float, float] | None = None

    def _preflight(self, *args: Any) -> None:
        start = _now()
        super()._preflight(*args)
        if self.preflight_s is None:
            self.preflight_s = _since(start)


class Probe(pl.Callback):
    """Calls interception and watch alone, in the last step, before its backward."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.seconds: dict[str, tuple[float, float]] = {}

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if trainer.global_step < NUM_STEPS - 1:
            return
        strategy = trainer.strategy
        step, mesh = strategy._steps.context.step, strategy.sequence_mesh
        tokens = step.batch.padded_length // mesh.layout.size
        config = pl_module.model.config
        heads, dim = config.num_heads, config.dim // config.num_heads
        query = torch.zeros(step.batch.rows, heads, tokens, dim)
        logits, target = torch.zeros(tokens, 2), torch.zeros(tokens, dtype=torch.int64)
        original = F.cross_entropy.__self__._originals["cross_entropy"]  # type: ignore[attr-defined]
        check = LossCheck(strategy._steps._operations)
        with mock.patch("lightning_sp.rewrite.sdpa.attend", lambda context, query, *_, **__: query):
            attention = self._time(lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True))
        with_all, alone = (
            self._time(lambda: F.cross_entropy(logits, target)),
            self._time(lambda: original(logits, target)),
        )
        watch = self._time(lambda: check.check(step, loss.detach(), mesh, strategy._groups.world))
        check.finish(mesh, strategy._groups.world)
        loss_alone = with_all[0] - alone[0], with_all[1] - alone[1]
        self.seconds = {"attention": attention, "cross entropy": loss_alone, "watch": watch}

    def _time(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Return the wall and CPU seconds of one call."""
        start = _now()
        for _ in range(self.calls):
            call()
        wall, cpu = _since(start)
        return wall / self.calls, cpu / self.calls


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(start: tuple[float, float]) -> tuple[float, float]:
    now = _now()
    return now[0] - start[0], now[1] - start[1]


def train(options: dict[str, Any], calls: int) -> dict[str, Any]:
    """Train the default model a few steps on the running ranks."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    with initialize_config_dir(str(CONF), version_base=None):
        config = compose("train", ["vocab_size=257"])
    clock, probe, strategy = Clock(), Probe(calls), Timed(**options)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_steps=NUM_STEPS, callbacks=[clock, probe], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = instantiate(config.model, max_steps=NUM_STEPS)
    trainer.fit(module, DataLoader(Tokens(NUM_STEPS, config.data.sequence_length), batch_size=1))
    # The first step has the preflight, the last one the probe.
    return {
        "steps": clock.steps[1:-1],
        "preflight": strategy.preflight_s,
        "calls": probe.seconds,
        "layers": config.model.model.num_layers,
    }


def main() -> None:
    """Read the command line and print a table for each layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    calls = parser.parse_args().calls
    with RankPool(2, timeout_s=600) as pool:
        for options in LAYOUTS:
            found = pool.run(train, options, calls)[0]
            wall, cpu = (statistics.median(each[i] for each in found["steps"]) for i in (0, 1))
            print(
                f"{options}: a step {1e3 * wall:.1f} ms, of which {1e3 * cpu:.1f} ms on the CPU; load {os.getloadavg()[0]:.1f}"
            )
            print(f"    preflight      {found['preflight'][0]:.2f} s, {found['preflight'][1]:.2f} s on the CPU")
            for name, (call_wall, call_cpu) in found["calls"].items():
                times = found["layers"] if name == "attention" else 1
                print(
                    f"    {name:14s} {1e6 * call_wall:6.0f} us a call, {1e6 * call_cpu:6.0f} us on the CPU; x {times} a step: "
                    f"{100 * times * call_wall / wall:.2f}% of its wall, {100 * times * call_cpu / cpu:.2f}% of its CPU time",
                    flush=True,
                )


if __name__ == "__main__":
    main()
