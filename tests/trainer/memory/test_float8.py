"""`fp8`: linear layers of float8 products, by torchao, are on parts of a sequence what the same library makes of the whole."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from lightning_sp import SequenceParallelError
from lightning_sp.config import StrategyConfig
from lightning_sp.parallelize import check_float8_device, check_float8_layers
from tests.trainer.memory import float8_ranks as ranks

RECIPE = "rowwise_with_gw_hp"
ON = dict(fp8="emulated")
# (what differs from the defaults of `fit`; of the plain run and of ours)
CASES = {
    "llama": dict(),
    "odd lengths": dict(data=dict(length=27)),
    "preflight": dict(build="hugging face", strategy=dict(preflight=True)),
    "global view": dict(strategy=dict(global_view=True)),
    "recomputed": dict(strategy=dict(activation_checkpointing="full")),
}
LAYOUTS = [
    pytest.param(2, dict(ring_size=2), [*CASES], id="ring", marks=pytest.mark.slow),
    pytest.param(2, dict(ulysses_size=2), ["llama", "preflight", "global view"], id="ulysses"),
    pytest.param(4, dict(data_parallel_size=2, ring_size=2), ["llama"], id="dp x ring", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def torchao():
    return pytest.importorskip("torchao", reason="torchao is not installed: pip install 'lightning-sp[torchao]'")


def _given(case, world, layout, **options):
    strategy = {"preflight": False, **layout, **CASES[case].get("strategy", {}), **options}
    return {"world": world, **CASES[case], "strategy": strategy}


@pytest.mark.parametrize(("world", "layout", "chosen"), LAYOUTS)
def test_a_fit_is_that_of_the_library_on_one_device(torchao, pools, world, layout, chosen):
    rows = 2 // layout.get("data_parallel_size", 1)
    given = [{**_given(case, world, layout, **ON), "rows": rows} for case in chosen]
    data = {"world": 1, "strategy": None, "recipe": RECIPE}
    plain = [{**data, **{key: value for key, value in CASES[case].items() if key != "strategy"}} for case in chosen]
    [expected] = pools(1).run(ranks.fits, plain)
    for found in pools(world).run(ranks.fits, given):
        for case, one, other in zip(chosen, expected, found, strict=True):
            assert other["layers"] == one["layers"] == 2 * ranks.PER_BLOCK, case
            assert other["losses"] == pytest.approx(one["losses"], rel=1e-10), case
            for kind in ("weights", "grads"):
                pairs = (
                    zip(one["grads"], other["grads"], strict=True) if kind == "grads" else [(one[kind], other[kind])]
                )
                for whole, sharded in pairs:
                    assert whole.keys() == sharded.keys()
                    for name, value in whole.items():
                        torch.testing.assert_close(sharded[name], value, rtol=1e-8, atol=1e-10, msg=f"{case}: {name}")


@pytest.mark.slow
def test_tiles_are_within_a_few_roundings(torchao, pools):
    """A product of fewer rows may have other last digits, and a number that then falls to the other side of a float8 rounding moves the loss by
    1e-10 and AdamW's next steps by more: the first step alone is compared, and without float8 it is the same to the last digits."""
    tiled = dict(activation_checkpointing="full", mlp_tile_tokens=8)
    cases = [_given("llama", 2, dict(ring_size=2), **options, **fp8) for fp8 in (ON, {}) for options in (tiled, {})]
    [rounded, of_rounded, plain, of_plain] = pools(2).run(ranks.fits, cases)[0]
    for one, other, tolerance in ((of_rounded, rounded, 1e-6), (of_plain, plain, 1e-13)):
        assert other["losses"][0] == pytest.approx(one["losses"][0], rel=tolerance)
        for name, value in one["grads"][0].items():
            torch.testing.assert_close(other["grads"][0][name], value, rtol=0.0, atol=tolerance, msg=name)


def test_it_rounds(torchao, pools):
    layout = dict(ring_size=2)
    cases = [_given("llama", 2, layout), _given("llama", 2, layout, **ON)]
    [[off, on, mixed], _] = pools(2).run(ranks.fits, [*cases, {**cases[1], "precision": "bf16-mixed"}])
    assert "fp8='emulated' with precision='bf16-mixed' on cpu ranks" in mixed["refused"]
    assert off["layers"] == 0
    assert off["losses"] != pytest.approx(on["losses"], rel=1e-5)
    assert off["losses"] == pytest.approx(on["losses"], rel=1e-2)


def test_a_recipe_that_looks_along_the_sequence_is_refused(torchao, pools):
    cases = [
        dict(world=2, strategy=dict(sequence_parallel_size=sp), recipe=r)
        for sp in (2, 1)
        for r in ("tensorwise", "rowwise")
    ]
    for tensorwise, rowwise, *of_rows in pools(2).run(ranks.fits, cases):
        assert "model.layers.0.attention.query is a Float8Linear that scales its input by" in tensorwise["refused"]
        assert "scales over tokens for its weight's gradient: each of the 2 ranks" in rowwise["refused"]
        assert all("losses" in each for each in of_rows), "each rank's own rows, as DDP has them"


def test_what_cannot_be_is_refused(monkeypatch):
    with pytest.raises(SequenceParallelError, match="fp8='tensorwise': must be True, False or 'emulated'"):
        StrategyConfig(fp8="tensorwise")
    with pytest.raises(SequenceParallelError, match=r"fp8=True.*scale by its part of a weight"):
        StrategyConfig(fp8=True, tensor_parallel_size=2)
    monkeypatch.setattr("lightning_sp.parallelize.float8.find_spec", lambda name: None)
    with pytest.raises(SequenceParallelError, match=r"fp8=True: torchao.*pip install 'lightning-sp\[torchao\]'"):
        check_float8_device(True, torch.device("cpu"))
    monkeypatch.setattr("lightning_sp.parallelize.float8.find_spec", lambda name: sys)
    with pytest.raises(SequenceParallelError, match="fp8=True on cpu ranks"):
        check_float8_device(True, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L40S")
    with pytest.raises(SequenceParallelError, match=r"NVIDIA L40S, of compute capability 8\.9.*9\.0 or more"):
        check_float8_device(True, torch.device("cuda"))
    check_float8_device(False, torch.device("cpu"))
    check_float8_layers(nn.Linear(2, 2), 2)
