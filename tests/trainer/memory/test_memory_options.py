"""The options that trade memory for time, alone and in pairs, through the real Trainer: bitwise a run without, where only placement changes."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.memory import memory_options_ranks as ranks

CHECKPOINTED = dict(activation_checkpointing=True)
DISK = dict(**CHECKPOINTED, activation_offload="disk")
# Of each run without an option those with it.
RUNS = [
    (dict(), [dict(reshard_after_forward=False), dict(reshard_after_forward=True)]),
    (
        CHECKPOINTED,
        [
            dict(DISK, activation_loading_horizon=1),
            dict(DISK, reshard_after_forward=False, activation_loading_horizon=2),
        ],
    ),
    (dict(CHECKPOINTED, shard_size=1), [dict(DISK, shard_size=1)]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [dict(ulysses_size=2), dict(ring_size=2, preflight=False)],
    ids=str,
)
def test_a_fit_is_bitwise_the_same_wherever_things_lie(pools, layout, tmp_path):
    """Two steps of two micro-batches of Hugging Face's Llama with an untied head; the preflight of one tries all options."""
    runs = RUNS if "preflight" not in layout else RUNS[1:2]
    cases = [dict(layout, **{"preflight": False, **each}) for plain, others in runs for each in (plain, *others)]
    cases[-1]["preflight"] = layout.get("preflight", True)
    [alone] = pools(1).run(ranks.fits, [{}], str(tmp_path))
    for found in pools(2).run(ranks.fits, cases, str(tmp_path)):
        assert found["left"] == []
        for own in found["runs"]:
            for name, weight in alone["runs"][0].items():
                assert (own[name] - weight).abs().max() <= 1e-10, name
        weights = iter(found["runs"])
        for _, others in runs:
            plain = next(weights)
            for own in (next(weights) for _ in others):
                assert all(torch.equal(own[name], weight) for name, weight in plain.items())


@pytest.mark.parametrize(
    "tied", [pytest.param(False, id="untied", marks=pytest.mark.slow), pytest.param(True, id="tied")]
)
def test_a_fit_on_four_ranks_is_one_process(pools, tied, tmp_path):
    """Ulysses 2 x ring 2, parameters over two ranks and twice, with all that lies elsewhere."""
    cases = [dict(DISK, ulysses_size=2, ring_size=2, shard_size=2, reshard_after_forward=tied, preflight=False)]
    [alone] = pools(1).run(ranks.fits, [{}], str(tmp_path), tied)
    for found in pools(4).run(ranks.fits, cases, str(tmp_path), tied):
        for name, weight in alone["runs"][0].items():
            assert (found["runs"][0][name] - weight).abs().max() <= 1e-10, name


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(sync_each_batch=False),
        pytest.param(dict(gradient_dtype="float32"), marks=pytest.mark.slow),
        pytest.param(dict(shard_size=1), marks=pytest.mark.slow),
        pytest.param(dict(shard_size=1, sync_each_batch=False), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_between_micro_batches_are_a_ranks_shards_or_whole(pools, options):
    [alone] = pools(1).run(ranks.accumulated, dict(preflight=False))
    for weights, held, numbers in pools(2).run(ranks.accumulated, dict(options, ulysses_size=2, preflight=False)):
        whole, shards = held[0]
        if options.get("sync_each_batch", "gradient_dtype" not in options):
            assert whole == 0
            assert 0 < shards <= numbers // options.get("shard_size", 2) + 1000
        else:
            assert (whole, shards) == (numbers, 0)
        assert all(after == 0 for after, _ in held[1::2])
        # The weights are float64: sums in float32 are rounded.
        tolerance = 1e-5 if "gradient_dtype" in options else 1e-10
        for name, weight in alone[0].items():
            assert (weights[name] - weight).abs().max() <= tolerance, name


def test_a_block_that_learns_later_has_gradients_of_its_own_dtype(pools):
    [expected, _], [found, _] = (pools(2).run(ranks.thawed, dtype) for dtype in ("auto", "float32"))
    for name, weight in expected.items():
        # AdamW makes much of the rounding of a small gradient.
        assert (found[name] - weight).abs().max() < 1e-4, name


@pytest.mark.slow
def test_a_checkpoint_of_other_units_is_resumed_from(pools, tmp_path):
    for whole, resumed in pools(2).run(ranks.resumed, str(tmp_path)):
        assert all(torch.equal(resumed[name], weight) for name, weight in whole.items())


def test_units_that_stay_whole_have_the_weights_after_an_update_by_hand(pools):
    [[alone]] = pools(1).run(ranks.by_hand, [{}])
    strategies = [dict(ulysses_size=2), dict(ulysses_size=2, reshard_after_forward=False)]
    for found in pools(2).run(ranks.by_hand, strategies):
        for own in found:
            for name, weight in alone.items():
                assert (own[name] - weight).abs().max() <= 1e-10, name


@pytest.mark.slow
def test_gradients_are_summed_in_another_dtype_through_the_trainer(pools, tmp_path):
    """In bfloat16 the preflight allows for its rounding; in float32 a bfloat16 model's micro-batches lose none of their sum."""
    for found in pools(2).run(ranks.rounded, str(tmp_path)):
        assert found["bfloat16"] < 2**-7
        assert found["bfloat16"] > 0


AUTOCAST = [
    dict(ulysses_size=2),
    pytest.param(
        dict(ring_size=2, preflight=False, ulysses_stages=2, stage_inputs="recomputed"), marks=pytest.mark.slow
    ),
    pytest.param(
        dict(ulysses_size=2, preflight=False, loss_chunk_tokens=None, mlp_tile_tokens=8, reshard_after_forward=False),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("options", AUTOCAST, ids=str)
def test_gathers_in_bfloat16_change_no_bit_of_a_fit_under_autocast(pools, options):
    # The preflight tries what is asked about.
    cases = [dict(options, gather_dtype="float32", preflight=False), dict(options, gather_dtype="auto")]
    projections = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    for (losses, gradients, none), (own_losses, own_gradients, found) in pools(2).run(ranks.autocast, cases):
        assert own_losses == losses
        for gradient, own in zip(gradients, own_gradients, strict=True):
            assert [name for name, each in gradient.items() if not torch.equal(each, own[name])] == []
        assert none == set()
        assert {name.split(".")[-2] for name in found} == projections | {"lm_head"}
        assert len(found) == 2 * len(projections) + 1


def test_options_that_do_nothing_on_cpu_ranks_are_refused_by_all(pools):
    for message in pools(2).run(ranks.refusal, dict(prefetch_blocks=2)):
        assert message.startswith(
            "prefetch_blocks=2 on CPU ranks: a gather over gloo has ended before its call returns"
        )


@pytest.mark.slow
def test_another_trainer_with_other_options_is_refused(pools, tmp_path):
    for message in pools(2).run(ranks.again, str(tmp_path)):
        assert "reshard_after_forward=False, before auto" in message
        assert "activation_offload=disk, before auto" in message
