"""A step that is tried leaves the module, its gradients and the random numbers as they were."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle
from multiprocessing import Value
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_sp.step.isolation.snapshot import MAX_BYTES, isolated


class Hoarder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.drop = nn.Dropout(0.5)
        self.names, self.queue, self.table, self.kinds = ["a"], deque([1], maxlen=3), {"x": [1]}, {1}
        self.tensor, self.number, self.late = torch.zeros(2), 1, None
        self.register_buffer("buffer", torch.zeros(2))
        self.shared = self.table["x"]

    def log(self, *args: object) -> None:
        raise AssertionError("logged")


class Evaluator:
    """A user's own object, that is no module."""

    def __init__(self) -> None:
        self.count, self.rows, self.total, self.array = 0, [torch.zeros(1)], torch.zeros(2), np.zeros(2)
        self.inner: object = None


def test_the_users_own_objects_are_put_back():
    module, metric = Hoarder(), MeanMetric()
    module.evaluator = Evaluator()
    module.evaluator.inner = (Evaluator(), module)
    module.metrics = {"loss": metric}
    big = torch.zeros(MAX_BYTES // 4 + 1)
    module.evaluator.inner[0].big = big
    with isolated(module, torch.device("cpu")):
        for each in (module.evaluator, module.evaluator.inner[0]):
            each.count += 1
            each.rows.append(torch.ones(1))
            each.total += 1
            each.array += 1
            each.late = True
        metric.update(3.0)
        big += 1
    for each in (module.evaluator, module.evaluator.inner[0]):
        assert (each.count, len(each.rows), float(each.total.sum()), float(each.array.sum())) == (0, 1, 0.0, 0.0)
        assert not hasattr(each, "late")
    assert not metric.update_called
    assert float(big[0]) == 1.0, "too large to be copied"


def test_tensors_that_repeat_their_memory_are_put_back():
    module = Hoarder()
    module.positions = {3: torch.arange(3).expand(2, 3), 1: torch.ones(1).expand(4)}
    with isolated(module, torch.device("cpu")):
        module.positions[3][0].add_(5)
        module.positions[1] = torch.zeros(4)
    assert module.positions[3].tolist() == [[0, 1, 2]] * 2
    assert module.positions[3].stride() == (0, 1)
    assert module.positions[1].tolist() == [1.0] * 4


class Frozen(OrderedDict):
    """A library's configuration, as diffusers has it: its items are attributes, and cannot be written."""

    def __init__(self, **items: object) -> None:
        super().__init__(items)
        self.__dict__.update(items)

    def __setitem__(self, *_: object) -> None:
        if "hidden" in self.__dict__:
            raise TypeError("frozen")
        super().__setitem__(*_)

    def update(self, *_: object, **__: object) -> None:
        raise TypeError("frozen")


class Counted(dict):
    """A user's dict whose update adds."""

    def update(self, other: dict[str, int]) -> None:
        for key, value in other.items():
            self[key] = self.get(key, 0) + value


class Stack(list):
    """A list that refuses to lose what it holds."""

    def clear(self) -> None:
        raise TypeError("not cleared")


def test_dicts_and_lists_of_classes_are_put_back_by_no_method_of_theirs(monkeypatch):
    monkeypatch.setattr(Frozen, "__module__", "torch.library_of_others")
    module = Hoarder()
    module.config, module.counts, module.stack = Frozen(hidden=4, sizes=[1]), Counted(a=1), Stack([1])
    with isolated(module, torch.device("cpu")):
        module.config.sizes.append(2)
        module.config.__dict__["late"] = True
        dict.__setitem__(module.config, "hidden", 8)
        module.counts.update({"a": 1, "b": 2})
        module.stack.append(2)
    assert (dict(module.config), vars(module.config)) == ({"hidden": 4, "sizes": [1]},) * 2
    assert [*module.config] == ["hidden", "sizes"]
    assert (module.counts, module.stack) == ({"a": 1}, [1])


def test_a_function_in_c_that_a_module_holds_is_left_alone():
    module = Hoarder()
    module.judge = pytest.importorskip("pandas._libs.lib").is_scalar  # Cython's, whose attributes cannot be written
    with isolated(module, torch.device("cpu")):
        module.number += 1
    assert module.number == 1


def test_modules_that_a_step_exchanges_are_put_back():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    before = list(module.named_children())
    with isolated(module, torch.device("cpu")):
        module[0] = nn.Identity()
        module.late = nn.Linear(2, 2)
    assert list(module.named_children()) == before


def test_hooks_that_a_step_registers_go_and_those_that_it_removes_stay_away():
    module, calls = Hoarder(), []
    module.forward = lambda: None
    once = module.register_forward_hook(lambda *_: calls.append("once"))
    module.register_forward_pre_hook(lambda *_: calls.append("always"))
    with isolated(module, torch.device("cpu")):
        once.remove()
        module.installed = True  # transformers notes so that its hooks are there
        module.register_forward_hook(lambda *_: calls.append("new"), always_call=True)
        module.register_forward_pre_hook(lambda *_: calls.append("new"), with_kwargs=True)
    module()
    assert calls == ["always"]
    assert not hasattr(module, "installed")
    assert not module._forward_hooks_always_called
    assert not module._forward_pre_hooks_with_kwargs


def test_what_users_keep_on_a_trainer_is_put_back():
    class Seen:
        def __init__(self) -> None:
            self.rows = 3

    module, callbacks = nn.Linear(2, 2), []
    kept = {"tokens": {"seen": 5}, "sum": torch.ones(2), "lengths": [1], "seen": Seen(), "moved": torch.zeros(1)}
    trainer = SimpleNamespace(
        optimizers=[], lr_scheduler_configs=[], callbacks=callbacks, datamodule=None, loggers=[], **kept,
        fit_loop=SimpleNamespace(_combined_loader=None),
    )  # fmt: skip
    module._trainer = trainer
    with isolated(module, torch.device("cpu")):
        trainer.tokens["seen"] += 1
        trainer.sum += 1
        trainer.lengths.append(2)
        trainer.seen.rows += 1
        trainer.moved = trainer.moved + 1
        trainer.new, trainer.made = {"rows": 1}, torch.ones(1)
        trainer.callbacks.append(1)
    assert trainer.tokens == {"seen": 5}
    assert trainer.sum.tolist() == [1, 1]
    assert trainer.lengths == [1]
    assert trainer.seen.rows == 3
    assert trainer.moved is kept["moved"]
    assert not hasattr(trainer, "new")
    assert not hasattr(trainer, "made")
    assert callbacks == [1]  # Lightning's own


def test_traceless_puts_back_what_a_step_writes():
    module = Hoarder()
    module.weight.grad = torch.full((2,), 5.0)
    grad, shared = module.weight.grad, module.shared
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    with isolated(module, torch.device("cpu")):
        assert module.weight.grad is None
        module.weight.sum().backward()
        module.names.append("b")
        module.queue.extend([2, 3, 4])
        module.table["y"], module.table["x"] = 2, module.table["x"]
        module.shared.append(7)
        module.kinds.add(2)
        module.tensor += 1
        module.buffer = torch.ones(3)
        module.number += 1
        module.late, module.later = torch.ones(1), 3
        module.log("x", 1)
        assert torch.equal(module.drop(torch.ones(50)), torch.ones(50))
        assert torch.equal(nn.functional.dropout(torch.ones(50), 0.9), torch.ones(50))
        torch.rand(3)
    assert module.weight.grad is grad
    assert (module.names, list(module.queue), module.table, module.kinds) == (["a"], [1], {"x": [1]}, {1})
    assert module.table["x"] is shared
    assert module.queue.maxlen == 3
    assert module.tensor.tolist() == [0, 0]
    assert module.buffer.tolist() == [0, 0]
    assert (module.number, module.late, hasattr(module, "later"), module.drop.p) == (1, None, False, 0.5)
    assert torch.equal(torch.rand(2), expected)
    with pytest.raises(AssertionError, match="logged"):
        module.log("x")
    assert not torch.equal(nn.functional.dropout(torch.ones(50), 0.9), torch.ones(50))


SEEN = {"steps": 0}
COUNT = 0
DRAWS = np.random.default_rng(5)


@dataclass(slots=True)
class Slots:
    count: int = 0


class Meter(dict):
    count = 0


class Outside(nn.Module):
    """A module that keeps what it counts elsewhere."""

    total = 0
    rows: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.space, self.options, self.slots, self.meter = SimpleNamespace(n=0), Namespace(n=0), Slots(), Meter()
        self.shared, self.draws, self.old_draws = Value("i", 0), np.random.default_rng(1), np.random.RandomState(2)
        self.ids, self.weights, self.phases = count(1), (0.5**each for each in range(9)), cycle("abc")
        self.same_ids = self.ids
        own = 0

        def add() -> int:
            nonlocal own
            own += 1
            add.calls += 1
            return own + add.calls

        add.calls = 0
        self.add = add

    def step(self, kept: list[int] = []) -> tuple[object, ...]:  # noqa: B006
        global COUNT
        COUNT += 1
        SEEN["steps"] += 1
        Outside.total += 1
        Outside.rows.append(1)
        kept.append(1)
        self.space.n, self.options.n, self.slots.count = self.space.n + 1, self.options.n + 1, self.slots.count + 1
        self.meter.count, self.meter["x"], self.shared.value = self.meter.count + 1, 1, self.shared.value + 1
        counted = (COUNT, SEEN["steps"], self.total, len(self.rows), len(kept), self.space.n, self.options.n)
        objects = (self.slots.count, self.meter.count, self.shared.value, self.add())
        drawn = (self.draws.random(), self.old_draws.rand(), DRAWS.random())
        return counted, objects, drawn, (next(self.ids), next(self.same_ids), next(self.weights), next(self.phases))


def test_what_a_step_keeps_outside_of_its_module_is_put_back():
    module, found = Outside(), []
    for _ in range(3):
        with isolated(module, torch.device("cpu")):
            found.append(module.step())
            module.step()
    assert found[0] == found[1] == found[2] == module.step()
    assert module.step()[3] == (3, 4, 0.5, "b"), "iterators go on behind a trial"


IDS = count(10)
NEXT = partial(next, IDS)


def rising() -> Iterator[int]:
    yield from (1, 2, 3, 4, 5, 6, 7)


def advance(seen: list[int]) -> int:
    seen[0] += 1
    return seen[0]


class Taking(nn.Module):
    """Takes from iterators wherever they are, and counts in what functions are given."""

    of_class = rising()

    def __init__(self) -> None:
        super().__init__()
        own, self.entries, self.places, self.table = rising(), {"a": count(0.5, 0.5)}, [rising(), "b"], {1: 2}
        self.take, self.next_id, self.seen = (lambda: next(own)), count(3).__next__, partial(advance, [5])

    def step(self, given: Iterator[int] = rising()) -> tuple[object, ...]:  # noqa: B008
        named = next(IDS), NEXT(), next(type(self).of_class), next(given)
        return (*named, self.take(), self.next_id(), next(self.entries["a"]), next(self.places[0]), self.seen())


def test_what_a_step_takes_from_iterators_is_there_again():
    module, found = Taking(), []
    for _ in range(3):
        with isolated(module, torch.device("cpu")):
            found.append(module.step())
            module.step()
    assert found[0] == found[1] == found[2] == module.step() == (10, 11, 1, 1, 1, 3, 0.5, 1, 6)
    assert module.step() == (12, 13, 2, 2, 2, 4, 1.0, 2, 7)
    assert (module.places[1], module.table) == ("b", {1: 2})


def average() -> Generator[float, float, None]:
    sums = [0.0, 0.0]
    while True:
        given = yield sums[0] / max(sums[1], 1)
        sums = [sums[0] + given, sums[1] + 1]


def test_a_generator_that_a_step_sends_to_is_refused_in_trials_and_goes_on_behind_them():
    module = nn.Module()
    module.average, module.idle = average(), rising()
    module.add = module.average.send
    next(module.average)
    for _ in range(2):
        with isolated(module, torch.device("cpu")), isolated(module, torch.device("cpu")):
            assert next(module.idle) == 1
            with pytest.raises(RuntimeError, match=r"the step calls send\(\) of a generator that is kept"):
                module.add(2.0)
    assert (module.average.send(2.0), module.add(4.0), next(module.idle)) == (2.0, 3.0, 1)
    with isolated(module, torch.device("cpu")):
        module.idle.close()
        assert list(module.idle) == []
    assert next(module.idle) == 2
    module.idle.close()
    assert list(module.idle) == []


def test_what_a_step_does_to_its_run_is_put_back():
    module, freed = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=torch.tensor(0.1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    trainer = SimpleNamespace(
        optimizers=[optimizer],
        lr_scheduler_configs=[SimpleNamespace(scheduler=schedule)],
        should_stop=False,
        callbacks=[],
        fit_loop=SimpleNamespace(_combined_loader=None),
    )
    module._trainer = trainer
    with isolated(module, torch.device("cpu")):
        module.weight.requires_grad_(False)
        trainer.should_stop, trainer.seen = True, 1
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.param_groups[0]["late"] = 1
        optimizer.add_param_group({"params": freed.parameters()})
        schedule.last_epoch += 1
    assert module.weight.requires_grad
    assert (trainer.should_stop, hasattr(trainer, "seen"), schedule.last_epoch) == (False, False, 0)
    assert len(optimizer.param_groups) == 1
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)
    assert "late" not in optimizer.param_groups[0]
