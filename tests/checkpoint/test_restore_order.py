"""A resumed run restores where plain Lightning does: before `configure_optimizers` and `on_fit_start`, by whatever names hooks load."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_sp.checkpoint import loads_by_own_rules
from lightning_sp.testing import max_error
from tests.checkpoint import restore_order_ranks as ranks


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for part in ("seen", "evaluated"):
        assert [hook for hook, _ in found[part]] == [hook for hook, _ in expected[part]]
        assert [value for _, value in found[part]] == pytest.approx([value for _, value in expected[part]], rel=1e-10)
    for own, plain in zip(found["reference"], expected["reference"], strict=True):
        assert max_error(own, plain) <= 1e-10
    for name, plain in expected["weights"].items():
        assert max_error(found["weights"][name], plain) <= 1e-10, name


@pytest.mark.parametrize("as_folder", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ({"ulysses_size": 2}, {}),
        ({"data_parallel_size": 2}, {"renames": "net.inner."}),
    ],
    ids=["weights", "names"],
)
def test_hooks_of_a_resumed_run_find_what_was_restored(pools, tmp_path, as_folder, layout, options):
    """Weights where plain Lightning has them; and by whatever names the user's hooks store and load them."""
    strategy = {**layout, "save_distributed_checkpoint": as_folder}
    expected = ranks.plain(2, str(tmp_path / "plain.ckpt"), options)
    micro = 2 // layout.get("data_parallel_size", 1)
    assert_same(pools(2).run(ranks.ours, strategy, micro, str(tmp_path / "ours.ckpt"), options)[0], expected)


@pytest.mark.parametrize("kind", ["hook", "method"])
def test_a_module_that_loads_by_rules_of_its_own_is_known(kind):
    class Own(torch.nn.Linear):
        def _load_from_state_dict(self, *given: Any) -> None:
            super()._load_from_state_dict(*given)

    def rename(state: dict[str, Any], *_: Any) -> None:
        state["weight"] = state.pop("w")

    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    assert not loads_by_own_rules(module)
    if kind == "hook":
        module[1]._register_load_state_dict_pre_hook(rename)
    else:
        module.append(Own(3, 3))
    assert loads_by_own_rules(module)
