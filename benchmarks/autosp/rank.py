"""One rank of one side: trains a step on each batch of a list and prints what each took, as a line of JSON.

    python -m benchmarks.autosp.rank SIDE MODEL '{"size": {...}, "lengths": [...], "options": {...}, "reference": FILE}'   (RANK, ... set)

Sides: "one process", which writes what it computes to the reference file; "autosp"; "lightning_sp". Knows torch and transformers alone.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.autosp.models import LEARNING_RATE, batch_of, loss_of, made
from benchmarks.instruments.end_with_parent import end_with_parent
from benchmarks.instruments.written import written_bytes


class Meter:
    """What each step took; a class because a Trainer's hooks begin and end it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def begin(self) -> None:
        """Begin a step, together with the other ranks."""
        dist.barrier()
        self._began = time.process_time(), time.perf_counter(), written_bytes()

    def end(self, loss: float) -> None:
        """End it."""
        cpu, wall, written = self._began
        self.steps.append({
            "cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall, "written": written_bytes() - written, "loss": loss,
        })  # fmt: skip


def compared(weights: dict[str, Tensor], file: str) -> float:
    """Return how far the change of the weights by the first step is from that of one process, over its largest element."""
    expected = torch.load(file)
    largest = max(float(change.abs().max()) for change in expected["changes"].values())
    errors = [weights[name] - expected["before"][name] - change for name, change in expected["changes"].items()]
    return max(float(error.abs().max()) for error in errors) / largest


def one_process(name: str, given: dict[str, Any], meter: Meter) -> dict[str, float]:
    """Train with plain torch, and write the first step's change of the weights."""
    model: nn.Module = made(name, given["size"])
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    for number, length in enumerate(given["lengths"]):
        batch = batch_of(name, length, number)
        meter.begin()
        loss = loss_of(model, name, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.end(float(loss))
        if number == 0:
            changes = {key: value.detach() - before[key] for key, value in model.named_parameters()}
            torch.save({"before": before, "changes": changes}, given["reference"])
    return {"error": 0.0}


def main(side: str, name: str, text: str) -> None:
    """Print what each step took, and the error of the first one's gradients."""
    end_with_parent()
    given = json.loads(text)
    torch.set_num_threads(1)
    answers: Any = sys.stdout
    sys.stdout = sys.stderr  # what a library prints is no answer
    dist.init_process_group("gloo")
    meter = Meter()
    run = one_process if side == "one process" else importlib.import_module(f"benchmarks.autosp.{side}").train
    try:
        found = run(name, given, meter)
        answer = {"steps": meter.steps, **found}
    except BaseException as error:
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        answer = {"refused": f"{type(error).__name__}: {' '.join(lines[:3])}"[:400]}
    print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # some do not end by themselves


if __name__ == "__main__":
    main(*sys.argv[1:])
