"""Parameters of shape () are saved, exported and resumed as one device has them, by any degrees and by plain Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sp import export_checkpoint
from lightning_sp.testing import assert_sharded_equals_unsharded
from tests.checkpoint.contents import single_number_ranks as ranks

# The ring's fits have the preflight.
RING, GROUPS = dict(ring_size=2), dict(data_parallel_size=2, preflight=False)


@pytest.fixture(scope="module")
def whole(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Two epochs of plain Lightning, and its checkpoint behind the first."""
    file = tmp_path_factory.mktemp("plain") / "plain.ckpt"
    pools(1).run(ranks.fit, 1, {}, 1, str(file))
    (found,) = pools(1).run(ranks.fit, 2, {}, 1)
    return found, file


def check(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for each in found:
        assert_sharded_equals_unsharded([each[name] for name in expected], [*expected.values()], [*expected])


def test_a_folder_resumes_on_other_degrees_and_is_exported_in_its_own_shapes(pools: Any, whole: Any, tmp_path: Path):
    expected, _ = whole
    folder = str(tmp_path / "folder.ckpt")
    (trained, _) = pools(2).run(ranks.fit, 1, RING, 2, folder)
    module = ranks.Numbers().double()
    state = torch.load(export_checkpoint(folder, tmp_path / "whole.pt"))
    assert {name: each.shape for name, each in state.items()} == {n: t.shape for n, t in module.state_dict().items()}
    module.load_state_dict(state, strict=True)
    assert all(torch.equal(each, trained[name]) for name, each in module.named_parameters())
    check(pools(2).run(ranks.fit, 2, GROUPS, 2, "", folder), expected)


def test_a_file_resumes_under_plain_lightning_and_plain_lightnings_here(pools: Any, whole: Any, tmp_path: Path):
    expected, plain = whole
    file = str(tmp_path / "file.ckpt")
    pools(2).run(ranks.fit, 1, RING | dict(save_distributed_checkpoint=False), 2, file)
    check(pools(1).run(ranks.fit, 2, {}, 1, "", file), expected)
    check(pools(2).run(ranks.fit, 2, RING | dict(preflight=False), 2, "", str(plain)), expected)
