"""What a block keeps from one call to the next is as without checkpoints: a recomputation sees what its forward saw, and leaves nothing."""

from __future__ import annotations

import copy
import gc
import itertools
import random
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.activation_checkpointing import checkpoint_blocks
from tests.slow import slow

WIDTH, TOKENS, STEPS = 6, 5, 3
POLICIES = ("selective", "matmuls", "full", "every_2")
LARGE = 1 << 17


class Block(nn.Module):
    """Each kind keeps something else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen = 0

    def keeps(self, h):
        return h

    def forward(self, x):
        return x + self.keeps(self.linear(x).sin())


class Counts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def keeps(self, h):
        self.n += 1
        return h * self.n.clone()


class CountsUnread(Counts):
    def keeps(self, h):
        self.n += 1
        return h


class Reassigns(Counts):
    def keeps(self, h):
        self.n = self.n + 1
        return h * self.n


class Averages(Block):
    """Exponential averages, by `.data` as vector quantizers write them: it raises no count of writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))

    def keeps(self, h):
        self.mean.data.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)
        return h * self.mean.clone()


class WritesMuch(Block):
    """More than is copied in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(LARGE))

    def keeps(self, h):
        self.table.data[: h.shape[1]] += h.detach().mean((0, 2))
        return h * (1 + self.table[: h.shape[1], None]).clone()


class Normalizes(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def keeps(self, h):
        return self.norm(h.flatten(0, 1)).view_as(h)


class Spectral(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear = spectral_norm(self.linear)


class CountsInPython(Block):
    def keeps(self, h):
        self.seen += 1
        return h * self.seen


class Lists(Block):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"last": deque(maxlen=2), "all": [], "seen": set(), "by": defaultdict(list)}

    def keeps(self, h):
        self.kept["all"].append(h.detach().mean())
        self.kept["last"].append(len(self.kept["all"]))
        self.kept["seen"].add(len(self.kept["all"]))
        self.kept["by"][len(self.kept["all"])].append(1)
        return h * sum(self.kept["all"])


class Meter:
    def __init__(self) -> None:
        self.count, self.of = 0, {"sum": 0.0}


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Objects(Block):
    def __init__(self) -> None:
        super().__init__()
        self.meters = [Meter(), Slotted()]

    def keeps(self, h):
        for meter in self.meters:
            meter.count += 1
        self.meters[0].of["sum"] += self.meters[1].count
        return h * self.meters[0].count


class Draws(Block):
    """From generators of its own, of which torch's checkpoint knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = [torch.Generator().manual_seed(1), random.Random(2), np.random.default_rng(3)]

    def keeps(self, h):
        noise = torch.rand(h.shape, generator=self.draws[0])
        return h * noise * self.draws[1].random() * float(self.draws[2].random())


class Numbers(Block):
    """Of numpy's array, and of an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.array, self.ids = np.zeros(3), itertools.count(1)

    def keeps(self, h):
        self.array[1] += 1
        return h * float(self.array[1]) * next(self.ids)


class Caches(Block):
    """A table that is made at the first call, by a product of matrices."""

    table = None

    def keeps(self, h):
        if self.table is None:
            self.table = torch.ones(WIDTH, 16, dtype=h.dtype) @ torch.ones(16, WIDTH, dtype=h.dtype)
        return h @ self.table


class Remembers(Block):
    """What it gave before."""

    def __init__(self) -> None:
        super().__init__()
        self.before = torch.zeros(WIDTH)

    def keeps(self, h):
        h, self.before = h + self.before, h.detach().mean((0, 1))
        return h


class Kept:
    """An object that a block makes anew in each call."""

    def __init__(self, h):
        self.h, self.itself = h, self


class RemembersGraphs(Block):
    """What it gave before, with its graph, in one of these."""

    holders: ClassVar = {
        "tensor": lambda h: h,
        "tuple": lambda h: (h.exp().sin(), h),
        "dict": lambda h: {"of": [h.exp().sin(), h]},
        "object": lambda h: [h.exp().sin(), Kept(h)],
        "list": None,
    }
    holder = "tensor"

    def __init__(self) -> None:
        super().__init__()
        self.before = None
        self.all = []

    def last(self):
        found = self.all if self.holder == "list" else self.before
        while not isinstance(found, torch.Tensor):
            found = (
                next(iter(found.values()))
                if isinstance(found, dict)
                else found.h
                if isinstance(found, Kept)
                else found[-1]
            )
        return found.detach()

    def keeps(self, h):
        given = h + self.last() if self.before is not None or self.all else h
        if self.holder == "list":
            self.all.append(h.exp().sin())
            self.all[:] = [h]
        else:
            self.before = self.holders[self.holder](h)
        return given.tanh()


class Aliases(Counts):
    """One memory under several names, in views and in another module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.double()
        self.n = self.n.double()
        self.same, self.inner = self.n, nn.Module()
        self.inner.register_buffer("n", self.n)
        self.flat = torch.zeros(2 * WIDTH, dtype=torch.float64)
        self.rows = list(self.flat.view(2, WIDTH).unbind())

    def _apply(self, function, recurse=True):
        return self  # a cast would make several of the one

    def keeps(self, h):
        self.n += 1
        self.flat += 1
        own = self.same if self.same is self.n else 0 * self.n
        return h * own.clone() * self.inner.n.clone() * self.rows[1].clone()


class Builds(Block):
    """A layer, and a parameter, that it makes at its first call."""

    built = False

    def keeps(self, h):
        if not self.built:
            self.built = True
            self.proj = nn.Linear(WIDTH, WIDTH).double()
            self.own = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))
        return self.proj(h) * self.own


@dataclass(frozen=True, slots=True)
class Frozen:
    table: torch.Tensor


class Checked:
    """An object whose class refuses to be written to; and which has a value only from the first call on."""

    __slots__ = ("late", "table")

    def __init__(self) -> None:
        object.__setattr__(self, "table", torch.ones(WIDTH, dtype=torch.float64))

    def __setattr__(self, name, value):
        raise ValueError(name)


class Objects2(Block):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.checked = Frozen(torch.ones(WIDTH, dtype=torch.float64)), Checked()

    def keeps(self, h):
        if not hasattr(self.checked, "late"):
            object.__setattr__(self.checked, "late", self.frozen.table * 2)
            h = h.exp()
        self.frozen.table.add_(1)
        return h * self.frozen.table.clone() * self.checked.late


class Tracker:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_):
        self.count += 1

    def add(self):
        self.count += 1
        return self.count


class Hooks(Block):
    """An object as a hook, one among a hook's arguments, and a method of one."""

    def __init__(self) -> None:
        super().__init__()
        self.add = Tracker().add
        trackers = Tracker(), Tracker()
        self.linear.register_forward_hook(trackers[0])
        self.linear.register_forward_hook(partial(lambda tracker, *_: tracker(), trackers[1]))
        self.count = lambda: trackers[0].count + trackers[1].count

    def keeps(self, h):
        return h * self.add() * self.count()


class UnusualTensors(Block):
    """That are read, and not written: sparse, without memory, large and quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [
            torch.eye(400).to_sparse(),
            torch.eye(400).to_sparse_csr(),
            torch.empty(4, device="meta"),
            torch.quantize_per_channel(torch.rand(200, 200), torch.ones(200), torch.zeros(200), 0, torch.qint8),
        ]
        self.freed = torch.ones(100)
        self.freed.untyped_storage().resize_(0)


LOSSES: list[torch.Tensor] = []
CALLS = 0


class KeepsInFile(Block):
    """What the whole file knows, as routers keep their losses; it is emptied before the backward."""

    def keeps(self, h):
        global CALLS
        CALLS += 1
        LOSSES.append(h.square().mean())
        return h * len(LOSSES)


class CountsInClass(Block):
    calls = 0
    by_call: ClassVar[dict[int, int]] = {}

    def keeps(self, h):
        CountsInClass.calls += 1
        self.by_call[self.calls] = 1
        return h * self.calls


KINDS = (
    *(
        Counts,
        CountsUnread,
        Reassigns,
        Averages,
        WritesMuch,
        Normalizes,
        Spectral,
        CountsInPython,
        Lists,
        Objects,
        Draws,
        Numbers,
        Caches,
    ),
    *(Remembers, KeepsInFile, CountsInClass, Aliases, Builds, Objects2, Hooks, UnusualTensors),
)


def plain(value):
    """Return what a value holds, for a comparison."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [plain(each) for each in value]
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, Meter):
        return plain(vars(value))
    if isinstance(value, Slotted):
        return value.count
    return str(value) if isinstance(value, itertools.count) else value


def state_of(block):
    """Return what a block keeps."""
    skipped = ("forward", "add", "count", "frozen", "checked", "others", "freed")
    own = {name: value for name, value in vars(block).items() if not name.startswith("_") and name not in skipped}
    return plain(own), plain(dict(block.named_buffers())), CountsInClass.calls, plain(CountsInClass.by_call), CALLS


def trained(kind, policy, *, forwards=1):
    """Return losses, gradients, and what the blocks keep, of some steps."""
    global CALLS
    LOSSES.clear()
    CountsInClass.by_call.clear()
    CountsInClass.calls = CALLS = 0
    torch.manual_seed(7)
    model = nn.Sequential(kind(), kind()).double()
    if policy is not None:
        checkpoint_blocks(model, list(model), policy, measures=False)
    found = []
    for step in range(STEPS):
        model.zero_grad()
        torch.manual_seed(step)
        outs = [model(torch.rand(2, TOKENS, WIDTH, dtype=torch.float64)) for _ in range(forwards)]
        loss = sum(out.square().mean() for out in outs) + sum(LOSSES)
        LOSSES.clear()
        loss.backward()
        found.append(loss.item())
        found += [p.grad.clone() for p in model.parameters()]
        found += [state_of(block) for block in model] + [len(LOSSES)]
    return found


def assert_alike(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, (a, b)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_recomputed_blocks_are_as_they_would_be(kind, policy):
    assert_alike(trained(kind, policy), trained(kind, None))


@pytest.mark.parametrize("kind", [Counts, Normalizes, Lists, Draws, WritesMuch], ids=lambda kind: kind.__name__)
def test_each_of_several_forwards_is_seen_again_as_it_was(kind):
    assert_alike(trained(kind, "selective", forwards=2), trained(kind, None, forwards=2))


class Scaled(Block):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def keeps(self, h):
        return self.drop(h) * self.scale


def switched(policy):
    """Return the gradients of a model that others switch between its forwards and behind them, and its switches."""
    torch.manual_seed(3)
    model = nn.Sequential(Scaled()).double()
    if policy is not None:
        checkpoint_blocks(model, list(model), policy, measures=False)
    x = torch.rand(2, TOKENS, WIDTH, dtype=torch.float64)
    first = model(x).square().sum()
    model[0].scale = 3.0
    second = model(x).square().sum()
    model.eval()
    model[0].scale = 5.0
    return [*torch.autograd.grad(first + second, list(model.parameters())), model[0].scale, model[0].drop.training]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_others_switch_between_forward_and_backward_is_as_it_was(policy):
    assert_alike(switched(policy), switched(None))


class WritesLate(Block):
    """To a large table, in its second call and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(LARGE))

    def keeps(self, h):
        self.seen += 1
        if self.seen > 1:
            self.table += 1
        return h


class WritesToGraph(Block):
    """To a number that has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros((), dtype=torch.float64)

    def keeps(self, h):
        self.total += h.sum()
        return h


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WritesLate, r"WritesLate writes in place to a tensor of shape \(131072,\) .*'table'.* the first call did not"),
        (WritesToGraph, r"WritesToGraph writes in place to a tensor of shape \(\) .*'total'.* it has a gradient"),
    ],
    ids=["late", "gradient"],
)
def test_a_write_that_is_not_undone_is_refused(kind, message):
    model = nn.Sequential(kind()).double()
    checkpoint_blocks(model, list(model), "selective", measures=False)
    x = torch.rand(2, TOKENS, WIDTH, dtype=torch.float64)
    with pytest.raises(SequenceParallelError, match=message):
        model(x) + model(x)


def test_another_way_than_a_larger_write_is_exact():
    """As the message has it."""

    class Larger(WritesLate):
        def keeps(self, h):
            self.seen += 1
            self.table = self.table + (self.seen > 1)
            return h * self.table[: h.shape[1], None]

    assert_alike(trained(Larger, "selective"), trained(Larger, None))


def remembered(holder, policy, steps):
    """Return gradients, and how many tensors there are behind each step."""
    torch.manual_seed(7)
    model = nn.Sequential(RemembersGraphs(), RemembersGraphs()).double()
    for block in model:
        block.holder = holder
    if policy is not None:
        checkpoint_blocks(model, list(model), policy, measures=False)
    found, counts = [], []
    for _ in range(steps):
        model.zero_grad()
        model(torch.rand(2, TOKENS, WIDTH, dtype=torch.float64)).square().mean().backward()
        found += [p.grad.clone() for p in model.parameters()]
        gc.collect()
        counts.append(sum(type(each) is torch.Tensor for each in gc.get_objects()) - len(found))
    return found, counts


@pytest.mark.parametrize("policy", ["selective", *slow("full")])
@pytest.mark.parametrize("holder", ["object", "tensor", *slow("dict", "tuple", "list")])
def test_what_is_kept_with_its_graph_is_seen_and_holds_no_earlier_step(holder, policy):
    found, counts = remembered(holder, policy, 6)
    assert_alike(found, remembered(holder, None, 6)[0])
    assert counts[-1] == counts[2]


def test_a_copy_of_a_block_learns_for_itself():
    torch.manual_seed(7)
    model = nn.Sequential(WritesMuch()).double()
    checkpoint_blocks(model, list(model), "selective", measures=False)
    x = torch.rand(2, TOKENS, WIDTH, dtype=torch.float64)
    model(x).sum().backward()
    other = copy.deepcopy(model)
    for each in (model, other):
        each.zero_grad()
        each(x).sum().backward()
    assert_alike([p.grad for p in other.parameters()], [p.grad for p in model.parameters()])
    assert torch.equal(other[0].table, model[0].table)


class Collects(nn.Module):
    """A list of losses that a hook fills, and that is replaced where it has been read."""

    def __init__(self, policy) -> None:
        super().__init__()
        self.blocks, self.losses = nn.Sequential(Block(), Block()).double(), []
        self.histogram = torch.zeros(LARGE)
        for block in self.blocks:
            block.linear.register_forward_hook(self.collect)
        if policy is not None:
            checkpoint_blocks(self, list(self.blocks), policy, measures=False)

    def collect(self, module, args, output):
        self.histogram += 1
        self.losses.append(output.square().mean() * float(self.histogram[0]))

    def forward(self, x):
        loss = self.blocks(x).square().mean() + sum(self.losses)
        self.losses = []
        return loss


class Appends(Block):
    """To a list that it is given."""

    def forward(self, x, aux):
        h = self.linear(x).sin()
        aux.append(h.square().mean())
        return x + h * len(aux)


class Given(nn.Module):
    def __init__(self, policy) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Appends(), Appends()]).double()
        if policy is not None:
            checkpoint_blocks(self, list(self.blocks), policy, measures=False)

    def forward(self, x):
        aux = []
        for block in self.blocks:
            x = block(x, aux)
        return x.square().mean() + sum(aux)


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("kind", [Collects, Given])
def test_lists_of_a_caller_are_as_they_would_be(kind, policy):
    found = []
    for one in (None, policy):
        torch.manual_seed(7)
        model = kind(one)
        for step in range(4):
            torch.manual_seed(step)
            model.zero_grad()
            loss = model(torch.rand(2, TOKENS, WIDTH, dtype=torch.float64))
            loss.backward()
            found.append(
                [loss.detach(), *(p.grad.clone() for p in model.parameters()), len(getattr(model, "losses", []))]
            )
    for one, other in zip(found[:4], found[4:], strict=True):
        assert_alike(one, other)
