"""One rank of one contestant: trains a step at each length and prints what was resident, as a line of JSON.

    python -m benchmarks.longest.rank CONTESTANT VARIANT '{"vocab_size": 32000, "lengths": [1024, 2048, 4096]}'     (RANK, WORLD_SIZE, ... set)

Knows torch and transformers alone, so that it runs in every contestant's environment.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.instruments.end_with_parent import end_with_parent
from benchmarks.instruments.resident import peak_growth, resident_bytes


class Meter:
    """What is resident before each step, and what the step adds; a class because a Trainer's hooks begin and end it.

    Args:
        before: bytes that were resident before the model was built.
    """

    def __init__(self, before: int) -> None:
        self.before = before
        self.measured: list[dict[str, Any]] = []
        self._step, self._measuring = ExitStack(), False

    def begin(self) -> None:
        """Begin a step, together with the other ranks."""
        dist.barrier()
        self._stays, self._began_s = resident_bytes() - self.before, time.perf_counter()
        self._growth = self._step.enter_context(peak_growth())
        self._measuring = True

    def begin_part(self, name: str) -> None:
        """Begin a part of the step; what a model is asked between steps (a trial) has none."""
        if self._measuring:
            self._growth.begin_part(name)

    def end(self, length: int, loss: float, **more: float) -> None:
        """End a step on a sequence of `length` tokens."""
        self._measuring = False
        self._step.close()
        seconds = time.perf_counter() - self._began_s
        self.measured.append(
            {
                "length": length,
                "stays": self._stays,
                "step": self._growth.peak_bytes,
                "parts": {name: self._stays + peak for name, peak in self._growth.parts.items()},
                "seconds": seconds,
                "loss": loss,
                **more,
            }
        )


def tokens(length: int, vocab_size: int, seed: int) -> Tensor:
    """Return one sequence, the same on all ranks. Shapes: -> (1, length + 1)."""
    return torch.randint(0, vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(seed))


def main(contestant: str, variant: str, text: str) -> None:
    """Print for each length what a step adds to what stays, and what stays: parameters, optimizer, what the libraries keep."""
    end_with_parent()
    problem: dict[str, Any] = json.loads(text)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    answers: Any = sys.stdout
    sys.stdout = sys.stderr  # what a contestant prints is no answer
    dist.init_process_group("gloo")
    module = importlib.import_module(f"benchmarks.longest.contestants.{contestant}")
    with peak_growth():
        pass  # sets the allocator
    meter = Meter(resident_bytes())
    # The first step makes the optimizer's state, and is not reported.
    lengths = [problem["lengths"][0], *problem["lengths"]]
    batches = [tokens(length, problem["vocab_size"], number) for number, length in enumerate(lengths)]
    if hasattr(module, "train"):
        module.train(variant, problem, world, batches, meter)
    else:
        step = module.build(variant, problem, rank, world, meter.begin_part)
        for batch in batches:
            meter.begin()
            loss = step(batch)
            meter.end(batch.shape[1] - 1, float(loss))
    print(json.dumps(meter.measured[1:]), file=answers, flush=True)
    os._exit(0)  # some contestants do not end by themselves


if __name__ == "__main__":
    main(*sys.argv[1:])
