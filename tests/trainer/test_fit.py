"""The whole through the real Trainer: what several ranks train is what one process trains."""

from __future__ import annotations

import pytest
import torch

from lightning_sp.testing import max_error
from tests.slow import slow
from tests.trainer import scenarios

TINY = 1e-12


def same_run(actual, expected):
    assert len(actual["losses"]) == len(expected["losses"])
    for a, b in zip(actual["losses"], expected["losses"], strict=True):
        assert a == pytest.approx(b, abs=TINY)
    for step, (a, b) in enumerate(zip(actual["grads"], expected["grads"], strict=True)):
        for name in b:
            assert max_error(a[name], b[name]) < TINY, f"gradient of {name} in step {step}"
    for name, weight in expected["weights"].items():
        assert max_error(actual["weights"][name], weight) < 1e-10, name


LAYOUTS = {
    2: [dict(ulysses_size=2), dict(ring_size=2, preflight=False), dict(data_parallel_size=2), dict(ring_size=2, shard_size=1)],
    4: [
        # The preflight tries one of one group and one of two.
        dict(ulysses_size=2, ring_size=2, shard_size=1),
        dict(data_parallel_size=2, ring_size=2, shard_size=2),
    ],
}  # fmt: skip
# The golden losses and the resumes have these degrees, too.
MORE_LAYOUTS = [
    dict(ulysses_size=4, shard_size=2),
    dict(ring_size=4, shard_size=4, preflight=False),
    dict(data_parallel_size=2, ulysses_size=2, preflight=False),
]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_fit_is_the_same_in_every_layout(pools, world):
    hold_layouts(pools, world, LAYOUTS[world])


@pytest.mark.slow
def test_a_fit_is_the_same_in_more_layouts(pools):
    hold_layouts(pools, 4, MORE_LAYOUTS)


def hold_layouts(pools, world, layouts):
    """Uneven masks, accumulation with a short last window, clipping, shuffling off; losses, raw gradients, final weights."""
    options = dict(accumulate_grad_batches=2, gradient_clip_val=0.5, max_epochs=1)
    cases = []
    for layout in layouts:
        micro = 4 // layout.get("data_parallel_size", 1)
        cases.append(dict(model="gpt", world=world, strategy=layout, data=dict(size=12), micro=micro, **options))
    expected = pools(1).run(
        scenarios.fits, [dict(model="gpt", world=1, strategy={}, data=dict(size=12), micro=4, **options)]
    )[0][0]
    for answers in pools(world).run(scenarios.fits, cases):
        for answer in answers:
            same_run(answer, expected)


def test_packed_and_padded_sequences_through_the_trainer(pools):
    variants = [dict(size=4, **more) for more in (dict(packed=True), dict(length=29), dict(length=29, packed=True))]
    expected = pools(1).run(scenarios.fits, [dict(model="llama", world=1, strategy={}, data=d) for d in variants])[0]
    layouts = [dict(ulysses_size=2, ring_size=2), dict(ring_size=4, preflight=False)]
    for layout in layouts:
        chosen = variants if layout is layouts[0] else variants[2:]
        cases = [dict(model="llama", world=4, strategy=layout, data=d) for d in chosen]
        for answers in pools(4).run(scenarios.fits, cases):
            for answer, one in zip(answers, expected[-len(chosen) :], strict=True):
                same_run(answer, one)


def test_evaluation_covers_each_sample_once_and_predict_returns_whole_sequences(pools):
    expected = pools(1).run(scenarios.evaluate, 1, {}, 7, 29, 1)[0]
    for strategy in (
        dict(data_parallel_size=2, ring_size=2),
        dict(ulysses_size=2, ring_size=2),
    ):
        for answer in pools(4).run(scenarios.evaluate, 4, strategy, 7, 29, 1):
            for name in ("val_loss", "mean", "perplexity"):
                assert answer["metrics"][0][name] == pytest.approx(expected["metrics"][0][name], rel=1e-6), name
            assert answer["metrics"][0]["val_loss"] == pytest.approx(expected["metrics"][0]["val_loss"], abs=1e-12)
            assert torch.equal(answer["tokens"], answer["whole"])
            assert torch.equal(answer["best"], expected["best"])


def test_what_a_predict_step_made_whole_is_returned_as_it_is(pools):
    expected = pools(1).run(scenarios.predict, 1, {}, "whole")[0]
    assert expected["pooled"][0].shape == (2, 16)
    for strategy in (dict(ring_size=2), dict(ulysses_size=2)):
        for answer in pools(2).run(scenarios.predict, 2, strategy, "whole"):
            assert answer.keys() == expected.keys()
            for name, batches in expected.items():
                for actual, one in zip(answer[name], batches, strict=True):
                    assert actual.shape == one.shape, name
                    assert max_error(actual, one) < 1e-12, name


@pytest.mark.parametrize(("kind", "shape"), [("last", "(2,)"), *slow(("flat", "(32, 61)"), ("number", "()"))])
def test_predictions_computed_from_a_part_are_refused_by_name(pools, kind, shape):
    for answer in pools(2).run(scenarios.predict, 2, dict(ring_size=2), kind):
        for part in (
            f"as tensor 1 of 2 one of shape {shape}",
            "between the 2 ranks",
            "here (2, 16)",
            "strategy.unshard",
        ):
            assert part in answer
    # With two sequences side by side all four ranks end together.
    for answer in pools(4).run(scenarios.predict, 4, dict(data_parallel_size=2, ring_size=2), kind):
        assert f"one of shape {shape}" in answer


@pytest.mark.parametrize(("eager", "world"), [(True, 2), *slow((True, 4), (False, 4))])
def test_initial_weights_are_rank_zeros_bit_for_bit(pools, eager, world):
    expected = pools(1).run(scenarios.initial_weights, 1, {}, False, eager)[0]
    # Seeds of each rank's own are the harder case.
    groups = dict(data_parallel_size=2, shard_size=world // 2)
    for strategy, per_rank_seed in ((dict(ring_size=world), eager), (groups, True)):
        for answer in pools(world).run(scenarios.initial_weights, world, strategy, per_rank_seed, eager):
            assert answer.keys() == expected.keys()
            assert all(torch.equal(answer[name], expected[name]) for name in expected)


def test_streams_are_read_by_one_rank_and_end_together(pools):
    for answer in pools(4).run(scenarios.stream, 4, dict(data_parallel_size=2, ring_size=2), [3, 5]):
        assert answer["steps"] == 5
        assert len(answer["losses"]) == 5
        assert all(loss == loss for loss in answer["losses"])


@pytest.mark.parametrize(
    ("name", "parameters", "grads", "optimizer"),
    [
        *slow(("64-true", "torch.float64", "torch.float64", "torch.float64")),
        *slow(("32-true", "torch.float32", "torch.float32", "torch.float32")),
        ("bf16-true", "torch.bfloat16", "torch.bfloat16", "torch.bfloat16"),
        ("bf16-mixed", "torch.float32", "torch.float32", "torch.float32"),
    ],
)
def test_precision(pools, name, parameters, grads, optimizer):
    # In the same precision: initial weights are drawn in the parameters' dtype.
    expected = pools(1).run(scenarios.precision, 1, {}, name)[0]["losses"]
    tolerance = {"64-true": 1e-12, "32-true": 1e-5}.get(name, 2e-2)
    for answer in pools(2).run(scenarios.precision, 2, dict(ring_size=2), name):
        assert (answer["parameters"], answer["grads"], answer["optimizer"]) == ({parameters}, {grads}, {optimizer})
        assert answer["losses"] == pytest.approx(expected, abs=tolerance)


@pytest.mark.slow
def test_evaluation_never_enters_inference_mode(pools):
    assert pools(2).run(scenarios.validate_then_fit_under_inference_mode, 2) == [2, 2]


@pytest.mark.parametrize(
    "strategy", [dict(ulysses_size=2, ring_size=2, ring_transport="network"), *slow(dict(ulysses_size=4))]
)
def test_activation_checkpointing_repeats_neither_kernel_nor_communication(pools, strategy):
    plain = pools(4).run(scenarios.checkpointed_calls, 4, strategy, False)
    checkpointed = pools(4).run(scenarios.checkpointed_calls, 4, strategy, True)
    for a, b in zip(plain, checkpointed, strict=True):
        assert a["kernel"] > 0
        assert {k: a[k] for k in ("kernel", "exchange", "transfer")} == {
            k: b[k] for k in ("kernel", "exchange", "transfer")
        }
        for name, grad in a["grads"][0].items():
            assert torch.equal(grad, b["grads"][0][name]), name


def test_recomputation_draws_the_forwards_dropout_again(pools):
    cases = [
        dict(model=model, world=2, strategy=dict(ring_size=2, preflight=False, activation_checkpointing=on), data=dict(size=4))
        for model, on in (("gpt", False), ("dropout gpt", False), ("dropout gpt", True))
    ]  # fmt: skip
    for without, plain, checkpointed in pools(2).run(scenarios.fits, cases):
        assert plain["losses"] != without["losses"], "dropout is in force"
        same_run(checkpointed, plain)


@pytest.mark.parametrize(
    ("size", "stream", "how"),
    [
        (4, False, "marked"),
        *slow((4, False, "by hand"), (3, False, "marked")),
        (3, False, "by hand"),  # the last batch holds a filler
        (4, True, "by hand"),
    ],
)
def test_a_batch_that_the_loader_sharded_is_not_sharded_again(pools, size, stream, how):
    whole = pools(2).run(scenarios.sharded_by_the_loader, 2, size, stream, "whole")
    for answer, expected in zip(
        pools(2).run(scenarios.sharded_by_the_loader, 2, size, stream, how), whole, strict=True
    ):
        assert not answer["error"], answer["error"]
        same_run(answer, expected)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("marked", ["ShardedBatch holds one rank's part", "shard_batch=False"]),
        ("by hand, uneven", ["loaders of different lengths: after 1 batches", "shard_batch=False"]),
    ],
)
def test_a_stream_that_gives_parts_is_read_by_every_rank_alike_or_refused(pools, how, words):
    for answer in pools(2).run(scenarios.sharded_by_the_loader, 2, 4, True, how):
        assert all(word in answer["error"] for word in words), answer["error"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("no attention", ["0 attention calls", "F.scaled_dot_product_attention"]),
        ("no sequence", ["no sequence dimension", "values: (2, 1)", "sequence_dims"]),
        ("unnamed sequence", ["mystery", "32 tokens", "sequence_dims"]),
        ("labels", ["labels_shifted=True", "shift_labels"]),
        (
            "restarting positions",
            ["row 0 goes from 15 to 0 at token 16", "packed_documents=True", "packed_documents=False"],
        ),
        ("jumping positions", ["row 0 goes from 15 to 116 at token 16", "packed_documents=False"]),
        ("mask of pairs", ["attention_mask of shape (2, 32, 8): must be (batch, tokens)"]),
        ("fp16", ["16-true", "64-true, 32-true, bf16-true, bf16-mixed"]),
        ("one rank fails", ["rank 1", "no sequence dimension"]),
        ("different samples", ["share one sequence but read different samples"]),
        ("local mse", ["differs between ranks", "from lightning_sp.reductions import batch_mean"]),
        ("mse alone", ["differs between ranks", "0 cross entropies were seen"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_by_name_on_all_ranks(pools, change, words):
    answers = pools(2).run(scenarios.refusal, "fit_with", 2, dict(ring_size=2), change)
    for answer in answers:
        assert not answer.startswith("NOT REFUSED"), answer
        for word in words:
            assert word in answer, answer
