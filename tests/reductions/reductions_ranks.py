"""What each rank runs in test_reductions.py; returns plain values."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sp import SequenceParallelError, ShardOptions, comm, reductions
from lightning_sp.config import AttentionOptions
from lightning_sp.context.step import SequenceContext, Step
from lightning_sp.data.batch.sharding import shard_batch
from lightning_sp.layout import pad, shard
from lightning_sp.mesh import SequenceMesh, build_device_mesh
from lightning_sp.reductions.scope import ReductionScope
from tests.reductions.programs import OF_BATCHES, PROGRAMS, Part

ROWS, E = 3, 4
DOCUMENTS = ([5, 1, 9, 4], [19], [2, 2, 2, 2, 2, 9])
OF_TOKENS = {"x": torch.nan, "mask": True, "weights": 1.0, "position_ids": 0, "labels": 7}


def whole_part(group: int, length: int) -> Part:
    """Rows of a data-parallel group."""
    g = torch.Generator().manual_seed(group)
    lengths = [[*each, length - sum(each)] if sum(each) < length else each for each in DOCUMENTS]
    starts = [torch.cat([torch.arange(n) for n in each])[:length] for each in lengths]
    return Part(
        x=torch.randn(ROWS, length, E, dtype=torch.float64, generator=g).requires_grad_(),
        weight=torch.linspace(0.5, 1.5, E, dtype=torch.float64).requires_grad_(),
        mask=torch.rand(ROWS, length, generator=g) < torch.tensor([[0.8], [0.3], [0.0 if group else 0.5]]),
        weights=torch.rand(ROWS, length, dtype=torch.float64, generator=g),
        position_ids=torch.stack(starts),
        labels=torch.randint(0, 9, (ROWS, length), generator=g),
        of_rows=torch.randint(1, 99, (ROWS,), generator=g).double(),
        length=length,
    )


def joined(parts: list[Part]) -> Part:
    """The rows of all groups as one batch, on leaves of its own."""
    first = parts[0]
    rows = {
        f.name: torch.cat([getattr(p, f.name) for p in parts]).detach()
        for f in fields(Part)
        if f.name not in ("weight", "length")
    }
    rows["x"].requires_grad_()
    return Part(**rows, weight=first.weight.detach().clone().requires_grad_(), length=first.length)


def expected(name: str, groups: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, its gradient by x of all groups, and by the shared weight: in plain torch."""
    parts = [whole_part(group, length) for group in range(groups)]
    program = PROGRAMS[name]
    if program in OF_BATCHES:
        whole = joined(parts)
        loss = program(whole)
        return loss.detach(), *torch.autograd.grad(loss, (whole.x, whole.weight))
    weight = parts[0].weight
    loss = torch.stack([program(replace(part, weight=weight)) for part in parts]).mean()
    of_x = torch.autograd.grad(loss, [part.x for part in parts], retain_graph=True, allow_unused=True)
    of_x = [torch.zeros_like(p.x) if g is None else g for g, p in zip(of_x, parts, strict=True)]
    return loss.detach(), torch.cat(of_x), torch.autograd.grad(loss, weight)[0]


def sharded_step(ring: int, ulysses: int, balance: str, length: int) -> tuple[SequenceContext, Part]:
    """A step in progress, and this rank's part."""
    mesh = SequenceMesh.build(
        build_device_mesh("cpu", data_parallel_size=dist.get_world_size() // (ring * ulysses), sequence_parallel_size=ring * ulysses),
        ring_size=ring, ulysses_size=ulysses,
    )  # fmt: skip
    whole = whole_part(mesh.data_parallel_rank, length)
    batch = {"input_ids": whole.labels, "position_ids": whole.position_ids}
    options = ShardOptions(packed_documents=True, balance=balance)
    _, info = shard_batch(batch, mesh.layout, mesh.sequence_rank, options)

    def cut(value: Tensor, fill: Any) -> Tensor:
        padded = pad(value.detach(), info.padded_length, dim=1, value=fill)
        return shard(padded, info.layout, mesh.sequence_rank, dim=1)

    own = replace(whole, **{name: cut(getattr(whole, name), fill) for name, fill in OF_TOKENS.items()})
    own.x.requires_grad_()
    context = SequenceContext(mesh, AttentionOptions())
    context.step = Step(batch=info)
    return context, own


def law(names: list[str], ring: int, ulysses: int, balance: str, length: int) -> dict[str, Any]:
    """By program: the loss on this rank, its error and those of both gradients against one device."""
    answers = {}
    for name in names:
        context, part = sharded_step(ring, ulysses, balance, length)
        mesh, info = context.mesh, context.step.batch
        with ReductionScope(context):
            loss = PROGRAMS[name](part)
            loss.backward()
        world = dist.get_world_size()
        value, of_x, of_weight = expected(name, mesh.data_parallel_size, length)
        start = mesh.data_parallel_rank * ROWS
        wanted = shard(
            pad(of_x[start : start + ROWS], info.padded_length, dim=1, value=0.0),
            info.layout,
            mesh.sequence_rank,
            dim=1,
        )
        found = torch.zeros_like(wanted) if part.x.grad is None else part.x.grad / world
        answers[name] = {
            "loss": float(loss.detach()),
            "loss_error": float((comm.reduce_sum(loss) / world - value).abs()),
            "x_error": float((found - wanted).abs().max()),
            "weight_error": float((comm.reduce_sum(part.weight.grad) / world - of_weight).abs().max()),
        }
    return answers


def uneven_rows(ring: int) -> list[Any]:
    """`gather_rows` where groups hold other numbers of rows: what arrived, and the gradient."""
    context, _ = sharded_step(ring, 1, "zigzag", 19)
    own = torch.arange(2.0 + context.mesh.data_parallel_rank).requires_grad_()
    with ReductionScope(context):
        rows = reductions.gather_rows(own)
    (rows * torch.arange(len(rows))).sum().backward()
    return [rows.tolist(), own.grad.tolist()]


def evaluated() -> list[float]:
    """In evaluation each group's rows are a batch of their own."""
    context, part = sharded_step(2, 1, "zigzag", 19)
    context.step = Step(batch=context.step.batch, loss_group=context.mesh.sequence_group)
    whole = whole_part(context.mesh.data_parallel_rank, 19)
    with ReductionScope(context):
        found = [PROGRAMS[each.__name__](part) for each in OF_BATCHES]
    return [float((a - PROGRAMS[f.__name__](whole)).abs()) for a, f in zip(found, OF_BATCHES, strict=True)]


def as_many_as_tokens() -> list[float]:
    """Numbers of rows, as many as this rank has tokens: what they count for."""
    context, part = sharded_step(2, 1, "zigzag", 19)
    rows = torch.linspace(0, 1, 10, dtype=torch.float64).expand(ROWS, 10)
    with ReductionScope(context):
        found = [
            reductions.batch_sum(rows, of="rows"),
            reductions.batch_mean(rows.square(), of="rows"),
            reductions.batch_sum(rows[:2, :3], of="rows"),
            reductions.batch_sum(torch.full((ROWS, 10), 0.5), of="tokens"),
            reductions.batch_sum(part.weights, of="tokens") - reductions.batch_sum(part.weights),
        ]
        return [float(each) for each in found]


def refusals() -> dict[str, str]:
    """What is refused inside of a step, by name."""
    context, part = sharded_step(2, 1, "zigzag", 19)
    odd, rank = part.x[:, :-1], context.mesh.data_parallel_rank
    calls: dict[str, Any] = {
        "unshard": lambda: reductions.unshard(odd),
        "shard": lambda: reductions.shard(odd),
        "sum": lambda: reductions.sequence_sum(odd),
        "mask": lambda: reductions.sequence_sum(part.x, part.mask[:, :-1]),
        "batch": lambda: reductions.batch_sum(part.x[part.mask]),
        "alike": lambda: reductions.batch_sum(torch.linspace(0, 1, 10).expand(3, 10)),
        "alike, padded": lambda: reductions.batch_mean(torch.linspace(0, 1, 10).expand(3, 10)),
        "of tokens": lambda: reductions.batch_mean(part.x[part.mask], of="tokens"),
        "positions": lambda: reductions.at_positions(part.x, torch.tensor([0, 18, 19 if rank else 3])),
        "rows": lambda: reductions.at_positions(part.x, torch.tensor([0, 18])),
        "documents": lambda: reductions.sequence_sum(part.x, documents=part.position_ids, num_documents=2),
        "shape": lambda: reductions.sequence_sum(part.x, documents=part.position_ids[0]),
    }
    said = {}
    with ReductionScope(context):
        for name, call in calls.items():
            try:
                call()
                said[name] = ""
            except SequenceParallelError as error:
                said[name] = str(error)
    return said
