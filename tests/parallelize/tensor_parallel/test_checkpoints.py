"""A checkpoint of split layers is one of whole ones: it resumes without tensor parallelism and back, and becomes one file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sp import export_checkpoint
from lightning_sp.testing import max_error
from tests.parallelize.tensor_parallel import tensor_parallel_ranks

# The preflight has tests of its own.
SPLIT = {"tensor_parallel_size": 2, "data_parallel_size": 2, "preflight": False}
# The other degrees alike: its random states are those of other ranks still.
WHOLE = {"data_parallel_size": 2, "preflight": False}


def run(pools: Any, name: str, world: int, **case: Any) -> dict[str, Any]:
    # The optimizer's state is that of two epochs: its second moments must be the parameters' own.
    found: dict[str, Any] = pools(world).run(tensor_parallel_ranks.fits, [dict(name=name, world=world, **case)])[0][0]
    return found


@pytest.fixture(scope="module")
def wholes(pools: Any) -> Callable[[str], dict[str, Any]]:
    return functools.cache(lambda name: run(pools, name, 1, max_epochs=2))


def same_end(found: dict[str, Any], whole: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(whole["losses"][-len(found["losses"]) :], abs=1e-12)
    for name, weight in whole["weights"].items():
        assert max_error(found["weights"][name], weight) < 1e-10, name


CASES = [("uneven", True), ("uneven", False), ("packed", True)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "as_folder"), CASES)
def test_a_run_goes_on_without_split_layers(
    pools: Any, wholes: Callable[[str], dict[str, Any]], tmp_path: Path, name: str, as_folder: bool
) -> None:
    run_it, whole = functools.partial(run, pools, name), wholes(name)
    saved = {"save_distributed_checkpoint": as_folder}
    first = str(tmp_path / "split.ckpt")
    begun = run_it(4, strategy={**SPLIT, **saved}, save=first)
    assert begun["split"]
    same_end(run_it(2, strategy={**WHOLE, **saved}, resume=first, max_epochs=2), whole)
    if as_folder:
        export_checkpoint(first, tmp_path / "one.safetensors")
        from safetensors.torch import load_file

        stored = load_file(tmp_path / "one.safetensors")
        assert {name: tuple(each.shape) for name, each in stored.items()} == {
            name: tuple(each.shape) for name, each in whole["weights"].items()
        }
        for each, weight in begun["weights"].items():
            assert torch.equal(stored[each], weight), each


@pytest.mark.parametrize(
    ("name", "as_folder"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])]
)
def test_a_run_goes_on_with_split_layers(
    pools: Any, wholes: Callable[[str], dict[str, Any]], tmp_path: Path, name: str, as_folder: bool
) -> None:
    run_it, saved = functools.partial(run, pools, name), {"save_distributed_checkpoint": as_folder}
    path = str(tmp_path / "whole.ckpt")
    run_it(2, strategy={**WHOLE, **saved}, save=path)
    same_end(run_it(4, strategy={**SPLIT, **saved}, resume=path, max_epochs=2), wholes(name))
