"""Heads in stages that are projected and exchanged again: every gradient is one process', and what cannot be staged is named."""

from __future__ import annotations

import pytest

from benchmarks.instruments.traffic import recomputed_sent_elements
from lightning_sp.testing import RankPool, max_error
from tests.rewrite import staged_heads_ranks as ranks
from tests.trainer import scenarios
from tests.trainer.test_fit import same_run

STAGED = dict(ulysses_stages=2, stage_inputs="recomputed")
PACKED, PADDED = {"packed": True}, {"length": 29}
ULYSSES, RING = dict(ulysses_size=2), dict(ring_size=2, ring_transport="network")
LAYOUTS = {1: {}, 2: ULYSSES, 4: dict(ulysses_size=2, ring_size=2)}
EXACT = {
    2: [
        (dict(build="ours 8/2"), ULYSSES, "none"),
        (dict(build="ours 6/2", data=PADDED), ULYSSES, "selective"),
        (dict(build="ours 4/4", data=PADDED), RING, "full"),
        (dict(build="llama", kind="hf_logits", data={"kind": "left padding", **PADDED}), ULYSSES, "selective"),
        (dict(build="llama with biases", data=PACKED), RING, "selective"),
        (dict(build="llama with a cache"), ULYSSES, "none"),
        (dict(build="qwen3", data={**PADDED, **PACKED}), ULYSSES, "full"),
        (dict(build="mistral window", data=PACKED), RING, "none"),
        (dict(build="repeated keys"), RING, "none"),
        (dict(build="frozen"), ULYSSES, "selective"),
        (dict(build="half adapted"), ULYSSES, "auto"),
    ],
    4: [
        (dict(build="ours 6/2"), LAYOUTS[4], "selective"),
        (dict(build="qwen3", data=PACKED), LAYOUTS[4], "none"),
        (dict(build="mistral window", data=PADDED), LAYOUTS[4], "full"),
    ],
    1: [(dict(build="ours 8/2"), {}, "none"), (dict(build="qwen3", data=PACKED), {}, "selective")],
}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow), 1])
def test_every_gradient_is_that_of_one_process(pools, world):
    cases = [
        dict(**case, world=world, strategy={**layout, **STAGED, "activation_checkpointing": policy})
        for case, layout, policy in EXACT[world]
    ]
    expected = [ranks.one_process(**case) for case, _, _ in EXACT[world]]
    for found in pools(world).run(ranks.steps, cases):
        for case, plain, staged in zip(cases, expected, found, strict=True):
            assert (staged["error"], staged["restored"]) == ("", []), case
            assert staged["losses"][0] == pytest.approx(plain["loss"], abs=1e-10)
            for name, grad in plain["grads"].items():
                if grad is not None:
                    assert max_error(staged["grads"][name], grad) < 1e-10, (case, name)


REFUSED = {
    "ours 8/1": "2 Attention (its 1 key-value heads do not divide into 2 stages)",
    "llama dropout": "2 LlamaAttention (its attention_dropout is 0.1)",
    "olmo2": "2 Olmo2Attention (its q_norm has parameters or buffers that are not of each head alike)",
    "gpt neox": "1 GPTNeoXLayer (no module in it has linear layers q_proj, k_proj, v_proj and o_proj",
    "gpt oss": "2 GptOssAttention (it has parameters or buffers that are not of each head alike)",
    "adapted": "2 LlamaAttention (its v_proj is a tests.rewrite.staged_heads_ranks.Adapted, not a plain linear layer",
    "adapted output": "2 LlamaAttention (its o_proj is a tests.rewrite.staged_heads_ranks.Adapted, not a plain linear layer",
    "hooked late": "LlamaAttention: its Linear has a hook",
    "heads last": "HeadsLast: the first head's rows of what makes q change its heads [0, 1], and should [0]",
    "other keys": "OtherKeys: the first head's rows of what makes k change its heads [0, 2], and should [0, 1]",
    "returned values": "OtherKeys returns 2 tensors",
    "biased": "in attention with a bias for each head: a stage has some of the heads alone",
    "hooked": "ranks find different attention modules to run in stages",
}


def test_what_cannot_be_staged_is_refused_by_name_on_all_ranks(pools):
    cases = [dict(build=build, strategy={**ULYSSES, **STAGED}) for build in REFUSED]
    for found in pools(2).run(ranks.steps, cases):
        for build, one in zip(REFUSED, found, strict=True):
            assert one["error"].startswith("stage_inputs='recomputed'"), (build, one["error"])
            assert REFUSED[build] in one["error"], one["error"]


def test_the_modules_that_are_staged_are_counted_and_the_others_named(pools):
    cases = [dict(build=build, strategy={**ULYSSES, **STAGED}) for build in ("llama", "half adapted")]
    (whole, half), _ = pools(2).run(ranks.steps, cases)
    said = "sequence_parallel: {} attention modules project and exchange their heads in 2 stages"
    assert whole["told"] == [said.format(2)]
    assert half["told"][0].startswith(said.format(1) + "; whole run 1 LlamaAttention (its q_proj is a ")


@pytest.mark.parametrize(("policy", "runs"), [("none", 1), ("selective", 1), ("full", 2)])
def test_what_is_sent_is_the_formula_and_no_kernel_runs_again_for_the_backward(pools, policy, runs):
    strategy = {**ULYSSES, "shard_size": 1, "activation_checkpointing": policy}
    cases = [dict(build="ours 8/2", strategy={**strategy, **STAGED}), dict(build="ours 8/2", strategy=strategy)]
    sizes = dict(batch=2, tokens=16, dim=4)
    for rank, (staged, plain) in enumerate(pools(2).run(ranks.steps, cases)):
        assert staged["kernels"] == 2 * plain["kernels"] > 0
        # Of two layers: for each of 2 stages q, k, v and out, in each run, and q, k, v, delta, the gradients of out and of q, k, v.
        assert staged["calls"]["all_to_all_single"] == 2 * 2 * (2 * runs + 4)
        whole = recomputed_sent_elements(8, 2, 2, 1, rank, **sizes, runs=runs)
        parts = recomputed_sent_elements(8, 2, 2, 2, rank, **sizes, runs=runs)
        assert parts > whole  # a stage has one key-value head, which both ranks need
        assert staged["sent"] == 2 * 8 * parts


@pytest.mark.slow
def test_of_q_k_and_v_one_stage_is_alive():
    # In tensors of this rank's tokens and all heads. Always there: out, its gradient, what is returned, the gradient of x. A stage's own, of n:
    # q, k, v exchanged, its gradient of out and what stands for out, dq, dk, dv; or these packed, on their way and laid. In one stage of all
    # heads out is exchanged besides, and the gradient of x comes in parts.
    heads, dim, rows, length = 8, 32, 128, 128
    unit = rows * length // 2 * heads * dim * 4
    with RankPool(2, timeout_s=120) as pool:
        for stages in (2, 4):
            for grown in pool.run(ranks.peak_bytes, 2, heads, heads, dim, rows, length, stages):
                assert 4 + 7.5 / stages < grown / unit < 4.4 + 9.5 / stages, f"{stages}: {grown / unit:.1f} tensors"


OTHERS = {
    "micro-batches, clipped, whole parameters": dict(
        strategy=dict(reshard_after_forward=False), options=dict(accumulate_grad_batches=2, max_steps=1, gradient_clip_val=0.5)
    ),
    "inputs on disk, MLPs in tiles": dict(
        strategy=dict(activation_checkpointing="selective", activation_offload="disk", activation_loading_horizon=1, mlp_tile_tokens=8)
    ),
    "with the preflight": dict(strategy=dict(preflight=True)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each == "with the preflight")) for each in OTHERS]
)
def test_a_fit_is_that_of_saved_stages(pools, name):
    more, options = OTHERS[name]["strategy"], OTHERS[name].get("options", dict(max_steps=2))
    cases = [
        dict(
            model="hugging face",
            world=2,
            strategy={**ULYSSES, "preflight": False, **more, **way},
            data=dict(size=4),
            **options,
        )
        for way in (dict(ulysses_stages=2), STAGED)
    ]
    for saved, staged in pools(2).run(scenarios.fits, cases):
        same_run(staged, saved)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_in_16_bits_gradients_are_as_near_as_without_stages(pools, precision):
    sizes = dict(model="llama", world=2, data=dict(size=2), max_steps=1)
    ways = [dict(precision="64-true"), dict(precision=precision), dict(precision=precision)]
    strategies = [{}, {}, STAGED]
    cases = [
        dict(**sizes, **way, strategy={**ULYSSES, "preflight": False, **strategy})
        for way, strategy in zip(ways, strategies, strict=True)
    ]
    for exact, plain, staged in pools(2).run(scenarios.fits, cases):
        for name, grad in exact["grads"][0].items():
            error, allowed = (max_error(each["grads"][0][name].double(), grad) for each in (staged, plain))
            assert error <= 2 * allowed, (name, error, allowed)


@pytest.mark.slow
def test_evaluation_is_that_of_saved_stages(pools):
    cases = [({**ULYSSES, **way}, 5, 32, 2) for way in (dict(ulysses_stages=2), STAGED)]
    for saved, staged in pools(2).run(ranks.evaluations, cases):
        assert staged["metrics"][0].keys() == saved["metrics"][0].keys()
        for key, value in saved["metrics"][0].items():
            assert staged["metrics"][0][key] == pytest.approx(value, abs=1e-10)
        assert (staged["best"] == saved["best"]).all()
