"""A checkpoint is one on all hosts: of which each rank reads a part."""

from __future__ import annotations

import pytest

from tests.checkpoint.folders import other_host_ranks as ranks


@pytest.mark.parametrize("as_folder", [True, False])
def test_another_checkpoint_on_a_host_is_refused(pools, tmp_path, as_folder):
    for said in pools(2).run(ranks.validate, str(tmp_path), as_folder):
        assert ".ckpt is not the same on all ranks" in said, said
        assert "on rank 0; " in said
