"""What runs in the ranks: the rules' cases and trainings, compiled in the global view."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from lightning_sp import SequenceParallelStrategy
from lightning_sp.global_view.compiled.front_end import FrontEnd, front_end
from lightning_sp.mesh import SequenceMesh, build_device_mesh
from lightning_sp.parallelize import compilation
from tests.global_view import rule_ranks
from tests.global_view.cases.rule_cases import CASES
from tests.global_view.models.modules import Block, module_of
from tests.global_view.training_ranks import trained
from tests.global_view.whole import Whole


def mesh_of(ulysses: int, ring: int) -> SequenceMesh:
    warnings.filterwarnings("ignore", "torch flash")
    base = build_device_mesh("cpu", data_parallel_size=1, sequence_parallel_size=ulysses * ring)
    return SequenceMesh.build(base, ring_size=ring, ulysses_size=ulysses)


def start() -> None:
    torch.compiler.reset()
    counters.clear()
    for backend in ("aot_eager", "inductor"):
        front_end(backend).notes.clear()


def compiled_case(name: str, tensors: tuple[Any, ...], whole: Whole) -> Any:
    return front_end("aot_eager").compiled(CASES[name])(*tensors, whole)


def rules(names: list[str], length: int, ulysses: int, ring: int) -> list[Any]:
    """Return for each case the largest errors, its graphs, how often one broke, and which run function by function."""
    mesh, found = mesh_of(ulysses, ring), []
    for name in names:
        start()
        errors = rule_ranks.errors(name, length, mesh, compiled_case)
        breaks = sum(counters["graph_break"].values())
        found.append((errors, counters["stats"]["unique_graphs"], breaks, list(front_end("aot_eager").notes)))
    return found


def failing(name: str, length: int, ulysses: int, ring: int) -> tuple[Any, list[str], list[str]]:
    """Run a case by a backend that fails: its errors, and the notes of it and of a function of plain tensors."""

    def backend(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no code for it")

    start()
    mesh, of_sequence, of_plain = mesh_of(ulysses, ring), FrontEnd(backend), FrontEnd(backend)

    def case(name: str, tensors: tuple[Any, ...], whole: Whole) -> Any:
        return of_sequence.compiled(CASES[name])(*tensors, whole)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    errors = rule_ranks.errors(name, length, mesh, case)
    x = torch.ones(3)
    assert torch.equal(of_plain.compiled(plain)(x), x.sin() + 1)
    return errors, of_sequence.notes, of_plain.notes


def lengths(given: list[int], ulysses: int, ring: int) -> list[tuple[float, int]]:
    """Run a block at several lengths; return the largest error beside the eager global view, and the graphs so far."""
    mesh, found = mesh_of(ulysses, ring), []
    start()
    torch.manual_seed(0)
    block = Block().double()
    run = front_end("aot_eager").compiled(block.forward)
    for length in given:
        gradients = []
        for forward in (block.forward, run):
            (_, ids, _), _ = rule_ranks.batch_of(length, mesh)
            block.zero_grad()
            x = nn.functional.embedding(ids, torch.linspace(-1, 1, 23 * 16, dtype=torch.float64).view(23, 16))
            out = forward(x)
            out.square().mean().backward()
            gradients.append([out.local.detach(), *(p.grad.clone() for p in block.parameters() if p.grad is not None)])
        eager, compiled = gradients
        error = max(float((a - b).abs().max()) for a, b in zip(eager, compiled, strict=True))
        found.append((error, int(counters["stats"]["unique_graphs"])))
    return found


def fits(
    losses: list[str], length: int, world: int, options: dict[str, Any], backend: str = "aot_eager"
) -> list[dict[str, Any]]:
    """Train compiled in the global view: weights, losses, graphs, and what was not compiled."""
    compilation.COMPILE_BACKEND = backend
    found = []
    for loss in losses:
        start()
        strategy = SequenceParallelStrategy(global_view=True, compile=True, **options)
        answer = trained(module_of(loss), strategy, world, length)
        found.append({
            **answer, "graphs": int(counters["stats"]["unique_graphs"]), "breaks": dict(counters["graph_break"]),
            "notes": list(front_end(backend).notes),
        })  # fmt: skip
    return found
