"""What is saved and when: by callbacks, whole, plain, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import checkpoint_ranks as ranks


@pytest.mark.slow
def test_model_checkpoint_early_stopping_and_evaluation_by_path(pools: Any, folder: Path) -> None:
    found = pools(2).run(ranks.model_checkpoint, 2, str(folder / "monitored"))
    assert found[0] == found[1]
    result = found[0]
    assert len(result["files"]) == 3
    assert "last.ckpt" in result["files"]
    assert result["measured"]["best"] == result["tested"] == result["best_score"]
    assert result["measured"]["last"] == result["last_val"]
    assert result["num_predictions"] == 2
    assert (result["epochs"], result["steps"]) == (4, 16)


def test_hyperparameters_are_plain_and_load_with_weights_only(pools: Any, folder: Path) -> None:
    result = pools(2).run(ranks.hyper_parameters, 2, str(folder / "hyper"))[0]
    assert result["hyper_parameters"]["options"] == {"a": [1, 2], "b": {"c": "x"}}
    assert result["hyper_parameters"]["colour"] == "<Colour.RED: 1>"
    assert result["step"] == 2
    known = result["known"]
    assert known["degrees"] == {"data_parallel_size": 1, "ring_size": 1, "ulysses_size": 2}
    assert (known["seed"], known["step"], known["global_batch_size"], known["shard_size"]) == (5, 1, 2, 2)
    assert known["position"]["global_samples_consumed"] == 2


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("strange", "['value'] is tests.checkpoint.checkpoint_ranks.Colour; return numbers, strings, tensors"),
        ("storage", "storage_options={'a': 1} are not supported"),
        ("foreign", "a folder of that name is there and is no checkpoint; it is not overwritten"),
        ("below a file", "; give a folder that every rank can write to: ModelCheckpoint(dirpath=...)"),
    ],
)
def test_what_cannot_be_saved_is_refused(pools: Any, folder: Path, what: str, message: str) -> None:
    path = folder / f"refused {what}"
    if what == "foreign":
        path.mkdir()
        (path / "thesis.txt").write_text("x")
    if what == "below a file":
        path.write_text("x")
        path = path / "x.ckpt"
    found = pools(2).run(ranks.save_refused, 2, str(path), what)
    assert message in found[0]
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_save_replaces_the_old_one_whole(pools: Any, tmp_path: Path) -> None:
    found = pools(2).run(ranks.replaced, 2, str(tmp_path / "x.ckpt"))
    kinds = ("folder", "folder", "file", "folder")
    assert found[0] == found[1] == [(f"x.ckpt {kind}", step) for step, kind in enumerate(kinds, start=1)]
