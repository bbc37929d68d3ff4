"""What a step does to optimizers, schedules and containers of its own, and to classes that it names, is put back behind a trial."""

from __future__ import annotations

import queue
from array import array
from collections import ChainMap, UserDict, UserList

import torch
from torch import nn

from lightning_sp.step.isolation.snapshot import isolated
from tests.step.isolation import kept_by_classes
from tests.step.isolation.kept_by_classes import Single


class Tally:
    """Counts in its class."""

    total = 0

    def add(self) -> int:
        Tally.total += 1
        return Tally.total


class Run:
    step = 0


class Probing(nn.Module):
    """Trains a probe beside itself, and writes down what it saw in containers of the standard library."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.probe, self.late = nn.Linear(3, 1), None
        self.optimizer = torch.optim.Adam(self.probe.parameters(), lr=0.1)
        self.anneal = torch.optim.lr_scheduler.ExponentialLR(
            torch.optim.SGD([nn.Parameter(torch.ones(()))], lr=1.0), 0.5
        )
        self.numbers, self.data, self.bytes = array("d", [1.0]), UserDict(n=0), bytearray(b"a")
        self.rows, self.chain, self.tally = UserList([0]), ChainMap({"n": 0}), Tally()
        self.waiting: queue.Queue[int] = queue.Queue()
        self.simple: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.waiting.put(1)
        self.simple.put(1)

    def step(self) -> tuple[object, ...]:
        if self.late is None:
            self.late = torch.optim.AdamW(self.probe.parameters(), lr=0.1)
        for optimizer in (self.optimizer, self.late):
            optimizer.zero_grad()
            self.probe(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
        self.anneal.optimizer.step()
        self.anneal.step()
        self.numbers.append(2.0)
        self.bytes += b"b"
        self.data["n"] += 1
        self.chain["n"] += 1
        self.rows.append(len(self.rows))
        for each in (self.waiting, self.simple):
            each.put(each.qsize())
            each.put(each.get() + each.get())
        Run.step += 1
        left = [self.simple.get() for _ in range(self.simple.qsize())]
        for each in left:
            self.simple.put(each)
        containers = len(self.numbers), bytes(self.bytes), self.data["n"], self.chain["n"], list(self.rows)
        counted = (
            self.tally.add(),
            Run.step,
            Single.of().add(),
            kept_by_classes.counted(),
            kept_by_classes.Named.rows[:],
        )
        kept_by_classes.Named.rows.append(1)
        return (
            *(float(each.sum()) for each in (self.probe.weight.detach(), self.probe.bias.detach())), self.anneal.get_last_lr(),
            containers, list(self.waiting.queue), left, counted,
        )  # fmt: skip


def test_what_a_step_does_to_them_is_put_back():
    module, found = Probing(), []
    for _ in range(3):
        with isolated(module, torch.device("cpu")):
            found.append(module.step())
            module.step()
    assert Single.one is None
    assert module.late is None
    assert not module.optimizer.state
    first, second = module.step(), module.step()
    assert found[0] == found[1] == found[2] == first != second


def test_states_of_an_optimizer_are_put_back_whatever_their_size(monkeypatch):
    monkeypatch.setattr("lightning_sp.step.isolation.snapshot.MAX_BYTES", 4)
    module = Probing()
    module.step()
    before = module.optimizer.state[module.probe.weight]["exp_avg"].clone()
    with isolated(module, torch.device("cpu")):
        module.step()
    state = module.optimizer.state[module.probe.weight]
    assert torch.equal(state["exp_avg"], before)
    assert float(state["step"]) == 1
