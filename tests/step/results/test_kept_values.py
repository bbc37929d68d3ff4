"""What is found to be kept by a step: new values in lists and dicts of a module, and nothing else."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import torch
from torch import nn

from lightning_sp.step.results.kept_values import KeptValues


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = ["old"]
        self.recent: deque[Any] = deque(["old"])
        self.by_name: defaultdict[str, list[Any]] = defaultdict(list, old=["old"])
        self.of_loaders: list[list[Any]] = [[], ["old"]]
        self.cache = torch.zeros(2)


def test_new_values_are_found_where_they_are_kept_and_replaced_there():
    module = Module()
    kept = KeptValues(module)
    assert not kept.new()
    module.rows += ["a", ("b", "c")]
    module.recent.append("d")
    module.by_name["old"].append("e")
    module.by_name["new"].append("f")
    module.of_loaders[1].append("g")
    module.cache = torch.ones(2)  # of the step's own
    assert sorted(map(str, kept.new().values())) == sorted(map(str, ["a", ("b", "c"), "d", "e", ["f"], "g"]))
    kept.replace(lambda values: {path: ("whole", each) for path, each in values.items()})
    assert module.rows == ["old", ("whole", "a"), ("whole", ("b", "c"))]
    assert list(module.recent) == ["old", ("whole", "d")]
    assert dict(module.by_name) == {"old": ["old", ("whole", "e")], "new": ("whole", ["f"])}
    assert module.of_loaders == [[], ["old", ("whole", "g")]]


def test_a_list_that_is_new_is_another_and_the_callers_stays_as_it_is():
    module = Module()
    kept, batch = KeptValues(module), {"ids": "part"}
    module.last_batch = batch
    assert kept.new() == {("last_batch",): batch}
    kept.replace(lambda values: {path: {"ids": "whole"} for path in values})
    assert (batch, module.last_batch) == ({"ids": "part"}, {"ids": "whole"})


def test_a_list_of_training_stays_the_one_that_layers_add_to_in_the_backward():
    module = Module()
    kept, masks = KeptValues(module, trains=True), [torch.zeros(2, 3)]
    module.rows.append(masks)
    kept.replace(lambda values: {path: [torch.ones(2, 6) for _ in value] for path, value in values.items()})
    assert module.rows[-1] is masks
    assert masks[0].shape == (2, 6)


def test_values_that_were_taken_away_are_not_missed():
    module = Module()
    kept = KeptValues(module)
    module.rows.clear()
    del module.by_name["old"]
    assert not kept.new()


def test_new_values_are_found_in_a_list_that_was_emptied_and_in_one_that_drops_its_first():
    module = Module()
    module.rows[:], module.recent = ["a", "b"], deque(["c", "d"], maxlen=2)
    kept = KeptValues(module)
    module.rows.clear()
    module.rows.append("e")
    module.recent.append("f")
    assert kept.new() == {("rows", 0): "e", ("recent", 1): "f"}
