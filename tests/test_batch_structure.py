"""A batch of any structure gives its entries by name, and comes back in its own classes."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_sp.batch_structure import entries_of, holds_tensors, with_entries


@dataclass
class Flat:
    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None = None
    name: str = "row"

    def __post_init__(self) -> None:
        self.checked = len(self.input_ids)


@dataclass(frozen=True, slots=True)
class Frozen:
    input_ids: Tensor
    rest: Any = field(default=None, kw_only=True)


class Pair(NamedTuple):
    input_ids: Tensor
    labels: Tensor


class Own:
    """As torchtext's: attributes, and a way to a device."""

    def __init__(self, text: Tensor, label: Tensor) -> None:
        self.text, self.label, self.batch_size = text, label, len(text)

    def to(self, device: Any) -> Own:
        return Own(self.text.to(device), self.label.to(device))


class Attributes(dict):
    __getattr__ = dict.__getitem__


X, Y = torch.arange(6).view(2, 3), torch.ones(2, 3)


def test_entries_have_their_own_names():
    assert list(entries_of({"input_ids": X, "n": 1})) == ["input_ids", "n"]
    assert list(entries_of((X, Y))) == ["0", "1"]
    assert list(entries_of(Pair(X, Y))) == ["input_ids", "labels"]
    assert list(entries_of(Flat(X, Y))) == ["input_ids", "labels", "position_ids", "name", "checked"]
    assert list(entries_of(Frozen(X, rest={"a": Y}))) == ["input_ids", "a"]
    assert list(entries_of(Own(X, Y))) == ["text", "label", "batch_size"]
    assert list(entries_of(({"input_ids": X}, Y))) == ["input_ids", "1"]
    assert list(entries_of({"a": {"input_ids": X, "k": 3}, "b": {"input_ids": Y}})) == [
        "a.input_ids",
        "k",
        "b.input_ids",
    ]
    assert list(entries_of({"input_ids": X, "b": {"input_ids": Y}})) == ["input_ids", "b.input_ids"]
    assert list(entries_of({"views": [X, Y], "texts": ["a", "b"], "meta": {"k": 1}})) == [
        "views.0",
        "views.1",
        "texts",
        "meta",
    ]
    assert list(entries_of(X)) == ["input_ids"]
    assert list(entries_of({"labels": [{"boxes": X}]})) == ["labels.0.boxes"]


@pytest.mark.parametrize("value", [3, "text", object(), torch.nn.Linear(2, 2), Flat])
def test_what_holds_no_tensor_is_no_batch(value):
    assert entries_of(value) is None


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": X, "labels": Y}, OrderedDict(input_ids=X, labels=Y), UserDict(input_ids=X, labels=Y), Attributes(input_ids=X, labels=Y),
        (X, Y), [X, Y], Pair(X, Y), Flat(X, Y), Frozen(X, rest=[Y, {"z": Y}]), Own(X, Y), ({"input_ids": X, "n": 3}, [Y, "text"]),
        {"a": Flat(X, Y), "b": (Pair(X, Y), 4)}, X,
    ],
    ids=lambda batch: type(batch).__name__,
)  # fmt: skip
def test_a_structure_comes_back_with_other_values(batch):
    entries = entries_of(batch)
    changed = {name: value + 1 if isinstance(value, Tensor) else value for name, value in entries.items()}
    made = with_entries(batch, changed)
    assert type(made) is type(batch)
    assert made is not batch
    found = entries_of(made)
    assert found.keys() == entries.keys()
    for name, value in entries.items():
        assert torch.equal(found[name], value + 1) if isinstance(value, Tensor) else found[name] is value
        assert entries_of(batch)[name] is value, "the given one stays"


def test_a_mapping_takes_other_entries_and_loses_those_that_are_left_out():
    for kind in (dict, UserDict, Attributes):
        made = with_entries(kind(input_ids=X, labels=Y), {"input_ids": X, "position_ids": Y})
        assert type(made) is kind
        assert list(made) == ["input_ids", "position_ids"]
    made = with_entries(Flat(X, Y), {"input_ids": Y, "position_ids": X, "shift_labels": Y})
    assert made.position_ids is X
    assert not hasattr(made, "shift_labels")


def test_a_batch_that_holds_itself_ends():
    batch: dict[str, Any] = {"input_ids": X}
    batch["again"] = batch
    assert holds_tensors(batch)
    assert "input_ids" in entries_of(batch)
