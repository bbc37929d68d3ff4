"""The crops of data-parallel groups are joined."""

from __future__ import annotations

import pytest
import torch

from lightning_sp import SequenceParallelError
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.preflight.crops.crop import Crop
from lightning_sp.preflight.crops.shared_crop import join_crops


def test_crops_are_joined_row_by_row():
    def crop(first, **more):
        ids = torch.arange(6).view(2, 3) + first
        batch = {
            "input_ids": ids,
            "position_ids": torch.arange(first, first + 3)[None],
            "names": ["a", "b"],
            "scale": 2.0,
        }
        return Crop(batch={**batch, **more}, rows=2, tokens=3, num_targets=first)

    joined = join_crops([crop(0), crop(1)], ShardOptions())
    assert (joined.rows, joined.tokens, joined.num_targets) == (4, 3, 1)
    assert joined.batch["input_ids"][:, 0].tolist() == [0, 3, 1, 4]
    assert joined.batch["position_ids"][:, 0].tolist() == [0, 0, 1, 1]
    assert (joined.batch["names"], joined.batch["scale"]) == (["a", "b", "a", "b"], 2.0)
    with pytest.raises(SequenceParallelError, match=r"groups 0 and 1 cannot be joined .* 2 x 3 tokens .*float32"):
        join_crops([crop(0), crop(1, scale=torch.ones(2))], ShardOptions())
    flat = Crop(batch={"input_ids": torch.zeros(3)}, rows=1, tokens=3, num_targets=None)
    with pytest.raises(SequenceParallelError, match=r"\['input_ids'\] carry the sequence along dim 0"):
        join_crops([flat] * 2, ShardOptions({"input_ids": 0}))
