"""What of a model's state is no tensor, and what hooks add to a checkpoint, comes back wherever a folder is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_sp import export_checkpoint
from tests.checkpoint.contents import extra_state_ranks as ranks


def test_a_folder_gives_back_what_is_no_tensor_and_what_hooks_have_added(pools: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    first, second = pools(2).run(ranks.fit_and_save, str(path))
    loaded = ranks.Counting.load_from_checkpoint(path)
    assert loaded.counter.counted == {"steps": 1, "names": ("a", "b")}
    for name, weight in first["weights"].items():
        assert torch.equal(loaded.halves[name], weight * 0.5)
    state = torch.load(export_checkpoint(path, tmp_path / "x.pt", dtype=torch.float64))
    assert state["counter._extra_state"]["steps"] == 1
    loaded.load_state_dict(state, strict=True)
    # What would not load again is refused where it is saved, on all ranks.
    assert "state_dict_objects['counter._extra_state']['device'] is builtins.object" in first["said"]
    assert first["said"] == second["said"]
    assert not Path(f"{path}.refused").exists()
