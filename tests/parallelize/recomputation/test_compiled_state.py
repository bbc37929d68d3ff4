"""A compiled block that writes to what it keeps, and reads it: the gradients and the state of one that is not compiled."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch import nn

from lightning_sp.global_view.compiled.saved import compiled_within
from lightning_sp.parallelize.activation_checkpointing import checkpoint_blocks
from lightning_sp.testing import max_error
from tests.parallelize.recomputation import test_state_of_blocks as blocks
from tests.slow import slow

KINDS = (
    *(blocks.Counts, blocks.CountsUnread, blocks.Reassigns, blocks.Averages, blocks.WritesMuch, blocks.Normalizes, blocks.Spectral),
    *(blocks.CountsInPython, blocks.Lists, blocks.Remembers, blocks.KeepsInFile),
)  # fmt: skip


class Read(blocks.Counts):
    """What it wrote itself, without a copy: torch's partitioner computes it again from what was written."""

    def keeps(self, h):
        self.n += 1
        return h * self.n


class ReadByData(Read):
    def keeps(self, h):
        self.n.data.add_(1)
        return h * self.n


POLICIES = ("none", "selective", "budget_1", "budget_50", "full", "matmuls")
# Each kind of state that is kept, and each of both policies that are not a budget's.
FEW = (
    (blocks.Counts, "selective"),
    (blocks.Reassigns, "selective"),
    (blocks.Spectral, "none"),
    (blocks.CountsInPython, "selective"),
    (blocks.Remembers, "none"),
    (Read, "none"),
    (Read, "selective"),
    (ReadByData, "budget_50"),
)


def trained(kind, policy, backend):
    torch.compiler.reset()
    torch.manual_seed(7)
    blocks.LOSSES.clear()
    blocks.CountsInClass.by_call.clear()
    blocks.CountsInClass.calls = blocks.CALLS = 0
    model = nn.Sequential(kind(), kind()).double()
    if policy is not None:
        checkpoints = checkpoint_blocks(model, list(model), policy, measures=False, backend=backend)
        for block in model:
            block.compile(backend=checkpoints.compile_block)
    found = []
    for step in range(3):
        model.zero_grad()
        torch.manual_seed(step)
        out = model(torch.rand(2, blocks.TOKENS, blocks.WIDTH, dtype=torch.float64))
        loss = out.square().mean() + sum(blocks.LOSSES)
        blocks.LOSSES.clear()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]
        found += [torch.tensor([float(block.seen), blocks.CountsInClass.calls, blocks.CALLS]) for block in model]
    return found


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(
    ("kind", "policy"),
    [*FEW, *slow(*(each for each in itertools.product((*KINDS, Read, ReadByData), POLICIES) if each not in FEW))],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_compiled_blocks_are_as_they_would_be(kind, policy):
    found, expected = trained(kind, policy, "aot_eager"), trained(kind, None, "")
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a - b).abs().max() <= 1e-12 * (1 + b.abs().max()), (number, a, b)


@pytest.mark.parametrize("how", ["", "budget_1"])
def test_a_copy_of_what_is_written_is_never_computed_again(how):
    x, found = torch.rand(2, blocks.TOKENS, blocks.WIDTH, dtype=torch.float64), []
    for backend in (None, partial(compiled_within, how, "aot_eager")):
        torch.compiler.reset()
        torch.manual_seed(7)
        block = Read().double()
        run = block if backend is None else torch.compile(block, backend=backend)
        run(x).square().mean().backward()
        found.append(block.linear.weight.grad)
    assert max_error(*found) < 1e-12


class Shares(nn.Module):
    """Buffers that share memory: parts of one, one under two names, a view that is returned."""

    def __init__(self, how) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(4, 4)
        self.register_buffer("all", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("same", self.all)
        self.a, self.b = self.all[:4], self.all[4:]

    def forward(self, x):
        h = self.linear(x).sin()
        if self.how == "whole":
            self.all += 1
            return h * self.a
        if self.how == "parts":
            self.a += 1
            self.b += 2
            return h * self.a * self.b
        if self.how == "part":
            self.a += 1
            return h * self.all[:4] * (self.b + 1)
        if self.how == "names":
            self.all += 1
            return h * self.same[:4]
        self.a += 1
        return h * self.a


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("how", ["whole", "parts", "part", "names", "one"])
@pytest.mark.parametrize("policy", ["none", "selective"])
def test_memory_that_several_have_is_written_to_once_for_all(how, policy):
    x, found = torch.rand(3, 4, dtype=torch.float64), []
    for is_ours in (False, True):
        torch.compiler.reset()
        torch.manual_seed(7)
        model = nn.Sequential(Shares(how)).double()
        block = model[0]
        block.a, block.b = block.all[:4], block.all[4:]
        if is_ours:
            checkpoints = checkpoint_blocks(model, [block], policy, measures=False, backend="aot_eager")
            block.compile(backend=checkpoints.compile_block)
        for _ in range(3):
            model.zero_grad()
            model(x).square().mean().backward()
            found.append([block.linear.weight.grad.clone(), block.all.clone(), block.a.clone()])
    for one, other in zip(found[:3], found[3:], strict=True):
        assert max(map(max_error, one, other)) < 1e-12


def test_a_view_that_is_returned_follows_later_writes():
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(4))

        def forward(self, x):
            self.n += 1
            return x * self.n, self.n[:2]

    torch.compiler.reset()
    module = Returns()
    run = torch.compile(module, backend=partial(compiled_within, "", "aot_eager"))
    _, view = run(torch.ones(4, requires_grad=True))
    run(torch.ones(4, requires_grad=True))
    assert view.tolist() == [2, 2]
