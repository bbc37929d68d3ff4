"""An out-of-memory error keeps its class and says what the memory was for and what would need less."""

from __future__ import annotations

import re

import pytest
import torch

from lightning_sp.config import StrategyConfig
from lightning_sp.parallelize.memory.memory_prediction import BlockBytes, StepBytes
from lightning_sp.trainer.out_of_memory import Held, remedies
from tests.trainer.memory import out_of_memory_ranks as ranks

LAYOUT = dict(ulysses_size=2, preflight=False)


def test_the_message_names_kinds_and_remedies(pools):
    for found in pools(2).run(ranks.fit, "memory", 2, LAYOUT):
        assert found["kind"] == "RuntimeError"
        assert found["is_oom"]  # what Lightning's Tuner looks for
        first, _, said = found["said"].partition("\nsequence_parallel: ")
        assert "can't allocate memory" in first
        assert said.startswith("out of memory after 1 steps, at 32 tokens of this rank. Parameters ")
        assert re.search(
            r"optimizer [1-9][\d.]* KiB, .*with mlp_tile_tokens='auto' \([1-9][\d.]* KiB less\); .* \([1-9][\d.]* KiB less\)$",
            said,
        )


def test_another_error_stays_as_it_is(pools):
    for found in pools(2).run(ranks.fit, "other", 2, LAYOUT):
        assert found["said"] == "something else"


@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_remedies_save(on_gpu):
    block = BlockBytes(kept=1000, attention=200, inputs=50)
    step = StepBytes(tokens=10, blocks=(block,) * 4, outside=3000)
    held = Held(parameters=8000, gradients=8000, optimizer=16000, gathered=0)
    config = StrategyConfig(loss_chunk_tokens=None)
    found = dict(remedies(held, step, 20, "none", config, ranks=2, world=4, shard_size=2, on_gpu=on_gpu))
    # By hand, a token: none 4 x 100 + 50 + 300, selective 4 x 25 + 75 + 50 + 300, full 4 x 5 + 95 + 50 + 300.
    assert found["loss_chunk_tokens='auto'"] == 300 * 20
    assert "optimizer_in_backward=True" not in found
    assert found["shard_size=4 for 2"] == 32000 / 2
    assert found["activation_checkpointing='selective'"] == 225 * 20
    assert found["activation_checkpointing='full'"] == 285 * 20
    where = "host" if on_gpu else "disk"
    assert found[f"activation_checkpointing='full' with activation_offload={where!r}"] == 285 * 20 + 20 * 20
    assert found.get("cpu_offload=True") == (32000 if on_gpu else None)
    assert found["sequence_parallel_size=4 for 2, or half as many tokens"] == 750 * 20 / 2
    assert torch.tensor([*found.values()]).min() > 0


def test_tiles_are_a_remedy_and_where_they_run_inputs_that_leave():
    block = BlockBytes(kept=1000, attention=200, inputs=50, wide=650, tile=40)
    step = StepBytes(tokens=10, blocks=(block,) * 4, outside=0)
    held = Held(parameters=0, gradients=0, optimizer=0, gathered=0)
    config = StrategyConfig()
    given = dict(ranks=2, world=2, shard_size=2, on_gpu=True)
    # By hand, a token: none 4 x 100 + 50, full 4 x 5 + 95 + 50, in tiles 4 x 5 + 35 + 20 with what
    # they give twice, and one and a half tiles whatever the tokens.
    found = dict(remedies(held, step, 20, "none", config, **given))
    assert found["activation_checkpointing='full'"] == 285 * 20
    assert found["activation_checkpointing='full' with mlp_tile_tokens='auto'"] == 375 * 20 - 60
    found = dict(remedies(held, step, 20, "full_tiled", config, **given))
    assert (
        found["activation_checkpointing='full' with mlp_tile_tokens='auto' with activation_offload='host'"] == 20 * 20
    )
    assert not any("mlp_tile" in each for each in dict(remedies(held, step, 20, "full_offloaded", config, **given)))
    whole = step.offering(tiles=[False] * 4, horizon=0)
    assert not any("mlp_tile" in each for each in dict(remedies(held, whole, 20, "none", config, **given)))
    compiled = dict(remedies(held, whole, 20, "none", StrategyConfig(compile=True), **given))
    assert not any("activation_offload" in each for each in compiled)


def test_gradients_that_a_run_does_not_need_at_once_are_a_remedy():
    step = StepBytes(tokens=10, blocks=(BlockBytes(kept=1000, attention=200, inputs=50),), outside=0)
    held = Held(parameters=8000, gradients=8000, optimizer=16000, gathered=0, freed_in_backward=7000)
    for given, saved in ((False, 7000), (True, None)):
        config = StrategyConfig(optimizer_in_backward=given)
        found = dict(remedies(held, step, 20, "none", config, ranks=2, world=4, shard_size=4, on_gpu=False))
        assert found.get("optimizer_in_backward=True") == saved
