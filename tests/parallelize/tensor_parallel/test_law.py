"""Layers split over ranks train as one process: losses, raw gradients and weights, in every company of the other degrees."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from lightning_sp.testing import max_error
from tests.parallelize.tensor_parallel import packed_ranks, tensor_parallel_ranks, vocabulary_ranks
from tests.trainer.optimizers import optimizer_ranks

TENSOR = {"tensor_parallel_size": 2}
# Uneven targets, accumulation with a short last window, clipping.
OPTIONS: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


def hold(pools: Any, name: str, layouts: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    """Fit on each layout and compare with one process; return what rank 0 gave."""
    options = {**OPTIONS, **options}
    [expected] = pools(1).run(tensor_parallel_ranks.fits, [dict(name=name, world=1, **options)])[0]
    found = []
    for layout in layouts:
        world = 1
        for size in ("tensor_parallel_size", "data_parallel_size", "ring_size", "ulysses_size"):
            world *= layout.get(size, 1)
        answers = pools(world).run(
            tensor_parallel_ranks.fits, [dict(name=name, world=world, strategy=layout, **options)]
        )
        for [answer] in answers:
            same(answer, expected)
        found.append(answers[0][0])
    return found


def same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["losses"] == pytest.approx(expected["losses"], abs=1e-12)
    assert len(actual["grads"]) == len(expected["grads"]) >= 2
    for step, (a, b) in enumerate(zip(actual["grads"], expected["grads"], strict=True)):
        assert a.keys() == b.keys()
        for name in b:
            assert max_error(a[name], b[name]) < 1e-12, f"gradient of {name} in step {step}"
    for name, weight in expected["weights"].items():
        assert max_error(actual["weights"][name], weight) < 1e-10, name


def test_two_ranks_with_half_of_each_layer_train_as_one(pools: Any) -> None:
    [found] = hold(pools, "llama", [TENSOR])
    attention = [f"layers.{i}.attention.{each}.weight" for i in (0, 1) for each in ("query", "key", "value", "output")]
    mlp = [f"layers.{i}.feed_forward.{each}.weight" for i in (0, 1) for each in ("gate", "up", "down")]
    assert sorted(found["split"]) == sorted(f"model.{each}" for each in attention + mlp)
    assert found["mesh"] == "dp 1 x ring 1 x ulysses 1 x tp 2"
    [said] = [each for each in found["warned"] if "words whole" in each]
    assert "whole on every rank: tensor_parallel_size=2 does not divide the 61 words of model.embedding;" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        dict(ulysses_size=2),
        dict(data_parallel_size=2, shard_size=1),
        dict(ring_size=2),
        dict(ring_size=2, shard_size=1),
        dict(data_parallel_size=2),
    ],
)
def test_beside_each_other_degree(pools: Any, layout: dict[str, Any]) -> None:
    hold(pools, "llama", [{**TENSOR, **layout}])


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("words", {}),
        pytest.param("tied words", dict(ulysses_size=2), marks=pytest.mark.slow),
        pytest.param("words", dict(ring_size=2), marks=pytest.mark.slow),
        pytest.param("words", dict(data_parallel_size=2), marks=pytest.mark.slow),
        pytest.param("words", dict(data_parallel_size=2, shard_size=1), marks=pytest.mark.slow),
        pytest.param("tied words", dict(data_parallel_size=2), marks=pytest.mark.slow),
        pytest.param("tied words", dict(ring_size=2, shard_size=1), marks=pytest.mark.slow),
        pytest.param("llama words", {}, marks=pytest.mark.slow),
        ("gemma2 words", {}),
        pytest.param("lora words", {}, marks=pytest.mark.slow),
        pytest.param("gpt words", dict(ulysses_size=2), marks=pytest.mark.slow),
    ],
)
def test_tables_and_heads_of_which_each_rank_has_its_words(pools: Any, name: str, layout: dict[str, Any]) -> None:
    """Uneven shards of words, a shared table, padding that is not trained, a table that scales, a softcap, a frozen head."""
    [found] = hold(pools, name, [{**TENSOR, **layout}])
    words = [each for each in found["split"] if any(word in each for word in ("embed", "head"))]
    assert len(words) == (1 if name in ("tied words", "gemma2 words") else 2)
    assert not [each for each in found["warned"] if "words whole" in each]


@pytest.mark.slow
def test_a_head_with_lora_around_it_is_whole_with_a_warning(pools: Any) -> None:
    [found] = hold(pools, "lora head", [TENSOR])
    assert not [each for each in found["split"] if "lm_head" in each]
    [said] = [each for each in found["warned"] if "words whole" in each]
    assert "lm_head is a peft.tuners.lora.layer.Linear, and no nn.Linear or nn.Embedding without options" in said


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["smoothed", "linear"])
def test_losses_of_parts_of_the_words(pools: Any, loss: str) -> None:
    """Label smoothing beside a z-loss; by the public function, with a softcap."""
    [found] = hold(pools, "words", [TENSOR], loss=loss)
    assert "model.head.weight" in found["split"]


@pytest.mark.slow
def test_logits_are_whole_for_who_reads_them(pools: Any) -> None:
    """By predictions, by an accuracy of validation, by `generate`, and after the step."""
    expected = pools(1).run(vocabulary_ranks.read, 1, {})[0]
    for answer in pools(2).run(vocabulary_ranks.read, 2, TENSOR):
        assert answer["numbers"] == pytest.approx(expected["numbers"], abs=1e-12)
        for name in ("predicted", "kept", "returned"):
            assert len(answer[name]) == len(expected[name]) > 0
            for a, b in zip(answer[name], expected[name], strict=True):
                assert max_error(a, b) < 1e-12, name
        assert answer["generated"] == expected["generated"]


def test_words_that_are_no_words_are_refused_as_on_one_device(pools: Any) -> None:
    for answer in pools(2).run(vocabulary_ranks.wrong_words):
        assert answer == {"token": "IndexError", "target": "IndexError"}


def test_no_rank_has_a_whole_table_head_or_logits(pools: Any) -> None:
    [whole] = pools(1).run(vocabulary_ranks.largest_tensors, 1, {})
    for split in pools(2).run(vocabulary_ranks.largest_tensors, 2, TENSOR):
        assert split["table"] <= whole["table"] / 2
        assert split["largest"] <= whole["table"] / 2 < whole["largest"]
        assert split["peak"] < 0.6 * whole["peak"]
        # What a prediction of memory counts on: tables are nearly all of this model.
        assert split["gathered"] < 0.52 * whole["gathered"]
        assert split["gradients"] < 0.52 * whole["gradients"]


def test_logits_that_one_rank_alone_keeps_wait_for_nobody(pools: Any) -> None:
    for answer in pools(2).run(partial(vocabulary_ranks.apart, 2, TENSOR, keeps=True)):
        assert len(answer["losses"]) == 2


def test_a_head_whose_words_are_not_finite_on_one_rank_is_named(pools: Any) -> None:
    first, second = pools(2).run(partial(vocabulary_ranks.apart, 2, TENSOR, spoils=True))
    assert second["said"] == []
    [said] = first["said"]
    assert "model.head is the first module whose output is not: 128 of 7936 numbers" in said
    assert "its weight is not finite" in said


@pytest.mark.slow
def test_no_rank_has_all_heads_of_a_packed_projection(pools: Any) -> None:
    strategies = [TENSOR, {**TENSOR, "tensor_parallel_plan": packed_ranks.GATHERED}]
    for packed, gathered in pools(2).run(packed_ranks.peaks, 2, strategies, 512):
        assert packed < 0.75 * gathered


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "difference"), [("32-true", 1e-6), ("bf16-mixed", 5e-3), ("bf16-true", 5e-3)])
def test_words_in_other_precisions(pools: Any, precision: str, difference: float) -> None:
    [whole] = pools(1).run(partial(vocabulary_ranks.apart, 1, {}, precision=precision))
    for split in pools(2).run(partial(vocabulary_ranks.apart, 2, TENSOR, precision=precision)):
        assert split["losses"] == pytest.approx(whole["losses"], abs=difference)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["parallel", "words of four"])
def test_four_parts_of_each_layer(pools: Any, name: str) -> None:
    hold(pools, name, [{"tensor_parallel_size": 4}])


@pytest.mark.parametrize(
    "name",
    [
        "parallel",
        pytest.param("tied", marks=pytest.mark.slow),
        pytest.param("qwen3", marks=pytest.mark.slow),
        pytest.param("lora", marks=pytest.mark.slow),
        "packed",
        pytest.param("packed lora", marks=pytest.mark.slow),
        pytest.param("lora of gathered", marks=pytest.mark.slow),
        pytest.param("gpt", marks=pytest.mark.slow),
        pytest.param("qwen2", marks=pytest.mark.slow),
        pytest.param("olmo2", marks=pytest.mark.slow),
        pytest.param("phi3", marks=pytest.mark.slow),
    ],
)
def test_models_of_other_forms(pools: Any, name: str) -> None:
    """Biases, a shared table, norms of each head, layers for several things, layers that gather, LoRA around each."""
    [found] = hold(pools, name, [TENSOR])
    assert found["split"]


PACKED_GPT2 = {
    "attn.c_attn": "packed_colwise", "attn.c_proj": "rowwise", "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt2", dict(tensor_parallel_plan=PACKED_GPT2)),
        ("packed", dict(ring_size=2)),
        ("packed", dict(data_parallel_size=2)),
        ("phi3", dict(ulysses_size=2)),
        ("phi3", dict(data_parallel_size=2, shard_size=1)),
        ("phi3 of four", dict(tensor_parallel_size=4)),
    ],
)
def test_layers_for_several_things_beside_each_other_degree(pools: Any, name: str, layout: dict[str, Any]) -> None:
    hold(pools, name, [{**TENSOR, **layout}])


def test_each_rank_has_its_share_of_each_part_and_keeps_no_copy_of_it(pools: Any) -> None:
    for size in (2, 4):
        for errors in pools(size).run(packed_ranks.errors, size):
            for what, error in errors.items():
                assert error < 1e-12, what


@pytest.mark.slow
def test_layers_of_other_styles_are_whole_with_a_warning(pools: Any) -> None:
    [found] = hold(pools, "mixtral", [TENSOR])
    assert {each.split(".")[-2] for each in found["split"]} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    [words, said] = [each for each in found["warned"] if "tensor parallelism" in each]
    assert "leaves words whole on every rank" in words  # 61 of them
    assert "of the model's plan 3 entries are not carried, or stand beside such: model.layers.*.mlp.experts" in said


@pytest.mark.slow
def test_an_optimizer_that_looks_at_its_part_alone_steps_whole_weights(pools: Any) -> None:
    """Of copies on each rank a norm of the part is right: it is tried on parts, too."""
    options: dict[str, Any] = dict(name="norm of shards", max_epochs=1)
    [whole] = pools(1).run(optimizer_ranks.fits, [dict(world=1, strategy={}, **options)])[0]
    [split] = pools(2).run(optimizer_ranks.fits, [dict(world=2, strategy=TENSOR, **options)])[0]
    assert "NormOfShards cannot step sharded weights" in split["said"][0]
    for name, weight in whole["weights"].items():
        assert max_error(split["weights"][name], weight) < 1e-10, name
