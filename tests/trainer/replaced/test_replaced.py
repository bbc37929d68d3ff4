"""What of other libraries a run replaces is on docs/replaced.md, and put back behind it."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from torch import nn

from lightning_sp.labels import shift_labels
from tests.trainer.replaced import found, page, runs

FIRST = ["one's own model", "one that fails in its second step"]


def hold(pools, tmp_path, names, most=4):
    told = page.places_told(page.TARGET.read_text())
    for places in pools(2).run(runs.looked_at, names, str(tmp_path), most):
        assert places
        left = [name for (name, _), moments in places.items() if "afterwards" in moments]
        assert all(name.endswith(found.OF_AN_OBJECT) for name in left)
        assert set(places) <= told, "python -m tests.trainer.replaced.page writes the page again"


def test_a_run_replaces_what_the_page_says_and_puts_it_back(pools, tmp_path):
    hold(pools, tmp_path, FIRST, most=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in runs.RUNS if name not in FIRST])
def test_other_runs_do_likewise(pools, tmp_path, name):
    hold(pools, tmp_path, [name])


def test_what_is_replaced_is_found_and_what_is_put_back_is_gone(monkeypatch):
    """The eyes are open: a function of a module, a method of a class, and one of an object."""
    layer = nn.Linear(1, 1)
    gone = weakref.proxy(nn.Linear(1, 1))
    found.begin(1)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "relu", shift_labels)
        patched.setattr(nn.Linear, "forward", shift_labels)
        patched.setattr(layer, "extra_repr", partial(shift_labels), raising=False)
        found.note("a step")
    found.note("afterwards")
    assert type(gone) in weakref.ProxyTypes  # is passed over
    name = "torch.nn.modules.linear.Linear"
    assert found.end() == {
        (each, "labels.py"): {"a step"}
        for each in ("torch.relu", f"{name}.forward", f"{name}.extra_repr{found.OF_AN_OBJECT}")
    }
