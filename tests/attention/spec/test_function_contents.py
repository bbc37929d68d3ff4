"""Functions of equal contents are known to be alike; what reads an object, or writes, is not known."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from lightning_sp.attention.spec.function_contents import Contents, UnknownContentsError

IDS = torch.arange(8)
LIMIT = 3


class Holder:
    window = 2


HOLDER = Holder()


def contents(value):
    return Contents().of(value)


def windowed(window):
    return lambda b, h, q, k: q - k < window


def of_ids(ids):
    return lambda b, h, q, k: ids[q] == ids[k]


def both(*functions):
    def together(b, h, q, k):
        return all(each(b, h, q, k) for each in functions)

    return together


def with_default(b, h, q, k, window=2):
    return q - k < window


def test_functions_are_alike_by_what_they_read():
    assert contents(windowed(2)) == contents(windowed(2))
    assert contents(windowed(2)) != contents(windowed(3))
    assert contents(windowed(2)) != contents(windowed(2.0))
    assert contents(of_ids(IDS)) == contents(of_ids(IDS))
    assert contents(of_ids(IDS)) != contents(of_ids(IDS.clone()))
    assert contents(both(windowed(2), of_ids(IDS))) == contents(both(windowed(2), of_ids(IDS)))
    assert contents(both(windowed(2))) != contents(both(windowed(1)))
    assert contents(partial(with_default, window=3)) != contents(partial(with_default, window=4))
    assert contents(lambda b, h, q, k: torch.where(q > k, math.pi, LIMIT))


def test_a_tensor_that_is_written_to_is_another():
    ids = IDS.clone()
    before = contents(of_ids(ids))
    ids[0] = 5
    assert contents(of_ids(ids)) != before


def test_a_name_of_a_file_is_read(monkeypatch):
    def limited(b, h, q, k):
        return q - k < LIMIT

    before = contents(limited)
    monkeypatch.setitem(globals(), "LIMIT", 4)
    assert contents(limited) != before


def of_object(holder):
    return lambda b, h, q, k: q - k < holder.window


class Sees:
    def __init__(self, window):
        self.window, self.ids = window, torch.arange(8)

    def mask(self, b, h, q, k):
        inner = lambda x: x < self.window  # noqa: E731
        return inner(q - k) & (self.ids[q] >= 0)

    @property
    def drawn(self):
        return torch.rand(())

    def by_property(self, b, h, q, k):
        return q < self.drawn

    def by_helper(self, b, h, q, k):
        return self.mask(b, h, q, k)

    def handed_on(self, b, h, q, k):
        return helped(self, q)


def helped(sees, q):
    return q < sees.window


def test_what_is_read_of_an_object_is_known():
    holder, other = Holder(), Holder()
    assert contents(of_object(holder)) == contents(of_object(other))
    other.window = 5
    assert contents(of_object(holder)) != contents(of_object(other))
    layer = torch.nn.Module()
    layer.window, layer.ids = 2, torch.nn.Buffer(IDS.clone())
    before = contents(lambda b, h, q, k: layer.ids[q] < layer.window)
    layer.window = 3
    assert contents(lambda b, h, q, k: layer.ids[q] < layer.window) != before
    for name in ("mask", "by_helper"):
        sees = Sees(2)
        before = contents(getattr(sees, name))
        assert contents(getattr(sees, name)) == before
        sees.window = 3
        assert contents(getattr(sees, name)) != before, name
        sees.window = 2
        sees.ids[0] = 3
        assert contents(getattr(sees, name)) != before, name


def counting():
    calls = 0

    def count(b, h, q, k):
        nonlocal calls
        calls += 1
        return q >= k

    return count


def recorded(seen):
    def record(b, h, q, k):
        seen[0] = q
        return q >= k

    return record


def marked():
    def function(b, h, q, k):
        return q >= k

    function.window = 2
    return function


def unbound():
    def function(b, h, q, k):
        return q < later

    made = function
    if made is None:
        later = 3
    return made


@pytest.mark.parametrize(
    "function",
    [
        HOLDER,
        Sees(2).by_property,
        Sees(2).handed_on,
        lambda b, h, q, k: helped(HOLDER, q),
        counting(),
        recorded([0]),
        marked(),
        unbound(),
        lambda b, h, q, k: q < not_there,  # noqa: F821
        {"a": 1}.get,
        of_ids(HOLDER),
        of_object({}.keys()),
    ],
)
def test_what_is_no_value_is_not_known(function):
    with pytest.raises(UnknownContentsError):
        contents(function)
