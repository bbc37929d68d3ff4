"""`exclude_frozen_parameters`: a checkpoint of adapters alone resumes as one of all parameters does, and loses nothing that was trained."""

from __future__ import annotations

import pytest
import torch

from lightning_sp.checkpoint import read_checkpoint_folder
from tests.checkpoint import frozen_ranks as ranks

ADAPTER = ["model.adapter.bias", "model.adapter.weight"]
RING, OTHER = dict(ring_size=2), dict(ulysses_size=2, shard_size=1)


@pytest.mark.parametrize("as_folder", [True, False], ids=["folder", "file"])
def test_a_checkpoint_of_adapters_alone_resumes_on_other_degrees(pools, tmp_path, as_folder):
    options, path = (
        dict(exclude_frozen_parameters=True, save_distributed_checkpoint=as_folder),
        str(tmp_path / "a.ckpt"),
    )
    whole = pools(2).run(_run, RING, dict(steps=6))[0]["weights"]
    pools(2).run(_run, {**RING, **options}, dict(steps=4, save=path))
    if as_folder:
        assert sorted(read_checkpoint_folder(path)["state_dict"]) == ADAPTER
    else:
        names, excluded = ranks.read(path)
        assert names == ADAPTER
        assert all(name.startswith("model.body.") for name in excluded)
    # The option says what is written; what was left out is known when it is read.
    for answer in pools(2).run(_run, OTHER, dict(steps=6, resume=path)):
        assert answer["error"] == ""
        for name, weight in whole.items():
            assert torch.allclose(answer["weights"][name], weight, rtol=0, atol=1e-12), name


def test_what_was_trained_before_it_was_frozen_is_not_left_out(pools, tmp_path):
    strategy = dict(exclude_frozen_parameters=True, **RING)
    for answer in pools(2).run(_run, strategy, dict(freeze_at=2, save=str(tmp_path / "a.ckpt"))):
        assert "exclude_frozen_parameters=True: 2 of 2 frozen parameters were trained in this run" in answer["error"]
        assert "model.adapter.weight" in answer["error"]


def test_a_model_without_what_was_left_out_is_another_model(tmp_path):
    from lightning_sp.checkpoint.check import check_model
    from lightning_sp.errors import SequenceParallelError

    own = {"a": (2,), "b": (3,)}
    check_model(tmp_path, {"a": (2,)}, own, strict=True, excluded={"b"})
    with pytest.raises(SequenceParallelError, match=r"1 are only in this model \(b\)"):
        check_model(tmp_path, {"a": (2,)}, own, strict=True)
    with pytest.raises(SequenceParallelError, match=r"1 are only in the checkpoint \(c\)"):
        check_model(tmp_path, {"a": (2,)}, own, strict=True, excluded={"b", "c"})


def _run(strategy, options):
    return ranks.run(strategy, **options)
