"""torchao's optimizers of 4 and 8 bits step shards: one device's steps where blocks of numbers are, and exact over a resume."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchao", reason="torchao is not installed: pip install 'lightning-sp[torchao]'")

from tests.trainer.optimizers import quantized_states_ranks as ranks

BYTES = {"AdamW8bit": 1 + 4 / 256, "AdamW4bit": 1 / 2 + 4 / 128, "AdamWFp8": 1 + 4 / 256}
# Of how far a weight has moved, by which one of shards that keep whole numbers is apart from one device's codes. A block of 4 bits is
# shorter, so that the last shard is made of whole ones.
APART = {"AdamW8bit": (0.1, 0.1), "AdamW4bit": (0.8, 0.0), "AdamWFp8": (0.1, 0.1)}
LAYOUT = dict(ulysses_size=2)


@pytest.mark.parametrize("kind", BYTES)
def test_shards_are_stepped_as_the_whole_where_they_are_quantized(pools, kind):
    for found in pools(2).run(ranks.steps, kind):
        assert found[:3] == [(0.0, False)] * 3
        for (apart, differs), most in zip(found[3:], APART[kind], strict=True):
            assert differs == (most > 0), "a shard that is not quantized keeps more than one device does"
            assert apart <= most


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=[pytest.mark.slow] * (each != "AdamWFp8")) for each in BYTES]
)
def test_a_run_is_resumed_to_the_bit_and_on_other_degrees(pools, kind, tmp_path):
    path = str(tmp_path / "half")
    save = dict(world=2, kind=kind, strategy=LAYOUT, save=path)
    whole = dict(world=2, kind=kind, strategy=LAYOUT, max_steps=5)
    in_backward = {**LAYOUT, "optimizer_in_backward": True}
    cases = [save, whole, {**whole, "resume": path}, {**whole, "strategy": in_backward, "resume": path}]
    for half, through, *resumed in pools(2).run(ranks.fits, cases):
        assert half["bytes"] == pytest.approx(BYTES[kind] * half["numbers"])
        assert half["numbers"] > 100_000
        for other in resumed:
            assert other["losses"] == through["losses"][3:]
            assert all(torch.equal(value, other["weights"][name]) for name, value in through["weights"].items())
    [alone] = pools(1).run(ranks.fits, [dict(world=1, kind=kind, strategy={}, max_steps=5, resume=path)])
    assert alone[0]["losses"] == pytest.approx(through["losses"][3:], abs=0.1)
