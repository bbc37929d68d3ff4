"""Lightning's callbacks that average weights: on shards the average is that of one device, saved in shards and resumed on other degrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks

from tests.trainer.averages import averaging_ranks as ranks

NAMES = [name for name in ranks.AVERAGES if hasattr(callbacks, name)]
# The fit before, on two ranks, is tried by the preflight.
AFTER = {
    "folder": dict(data_parallel_size=2, ring_size=2, preflight=False),
    "file": dict(data_parallel_size=2, ulysses_size=2, preflight=False),
}


def largest_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "folder") for name in NAMES),
        *((name, "file") for name in (NAMES[0], NAMES[-1])),
    ],
)
def test_an_average_is_one_devices_also_resumed_on_other_degrees(pools: Any, tmp_path: Path, name: str, kind: str):
    def run(world: int, strategy: Any, folder: str, *, resume: bool = False) -> list[dict[str, Any]]:
        paths = ["", str(tmp_path / folder / "epoch=1.ckpt")] if resume else [str(tmp_path / folder)]
        rows = 2 if world == 4 else 4
        return pools(world).run(ranks.trained, name, strategy, rows, "64-true", 4, *paths)

    as_folder = dict(save_distributed_checkpoint=kind == "folder")
    run(1, None, "one")
    (expected,) = run(1, None, "one", resume=True)
    run(2, dict(ulysses_size=2, **as_folder), "two")
    found = run(4, dict(**AFTER[kind], **as_folder), "two", resume=True)
    for rank in found:
        # The callback's copy is in float32, as plain Lightning's: it is made before the Trainer's precision changes the model.
        assert largest_error(rank["weights"], expected["weights"]) <= 2**-22
        assert [list(each) for each in rank["logged"]] == [list(each) for each in expected["logged"]]
        for epoch, wanted in zip(rank["logged"], expected["logged"], strict=True):
            # val_loss is a mean over data-parallel groups, as DDP's.
            assert epoch["val_mean"] == pytest.approx(wanted["val_mean"], abs=2e-6)
        assert rank["numbers"] <= 0.3 * expected["numbers"]
        assert not rank["setup"]
    if kind == "folder":
        names = pools(1).run(ranks.stored, str(tmp_path / "two" / "epoch=1.ckpt"))[0]
        copies = [each for each in names if "average_model_state" in each or "current_model_state" in each]
        assert len(copies) >= len(expected["weights"]) - 1  # the buffer is whole on every rank


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(callbacks, "EMAWeightAveraging"), reason="this Lightning has no EMAWeightAveraging")
@pytest.mark.parametrize("as_folder", [True, False])
def test_the_best_checkpoint_is_validated_after_the_fit(pools: Any, tmp_path: Path, as_folder: bool):
    (expected,) = pools(1).run(ranks.best, None, str(tmp_path / "one"))
    strategy = dict(ring_size=2, save_distributed_checkpoint=as_folder)
    for found in pools(2).run(ranks.best, strategy, str(tmp_path / "two")):
        assert found == pytest.approx(expected, abs=2e-6)


# Plain WeightAveraging without a function fails in torch 2.11 where the average has another dtype.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "WeightAveraging"])
def test_an_average_has_the_dtype_that_plain_lightning_gives_it(pools: Any, name: str):
    (expected,) = pools(1).run(ranks.trained, name, None, 4, "bf16-true", 1)
    for rank in pools(2).run(ranks.trained, name, dict(ring_size=2), 4, "bf16-true", 1):
        assert rank["dtype"] == expected["dtype"] == "torch.float32"


@pytest.mark.skipif(not hasattr(callbacks, "WeightAveraging"), reason="this Lightning has no WeightAveraging")
def test_a_setup_of_the_users_own_is_refused(pools: Any):
    for message in pools(2).run(ranks.own_setup):
        assert message.startswith("OwnSetup.setup copies the module before its parameters are sharded over 2 ranks")
        assert "on_fit_start" in message
