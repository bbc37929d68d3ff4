"""Weights that travel in bfloat16: the bits of losses and gradients, and which weights they are."""

from __future__ import annotations

import pytest

from tests.parallelize.fsdp import gather_dtypes_ranks as ranks

CAST = ("linear", "float by hand", "rows", "convolution", "twice", "recomputed")
PARTS = {f"{name}.layer" for name in (*CAST, "low rank")} | {"low rank.a", "low rank.b"}
IN_BLOCKS = {f"model.blocks.{number}.parts.{part}.weight" for number in (0, 1) for part in PARTS}


OFTEN = [
    pytest.param((2,), 1, id="2"),
    pytest.param((2, 2), 2, id="2x2", marks=pytest.mark.slow),
    pytest.param((4,), 1, id="4", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("shape", "micro_batches"), OFTEN)
def test_losses_and_gradients_are_bit_by_bit_those_of_float32_gathers(pools, shape, micro_batches):
    """A router in float32 and a weight that a forward reads travel in float32, as norms, biases and the embedding do."""
    world = 2 if sum(shape) == 2 else 4
    for differ, found, before in pools(world).run(ranks.law, "parts", shape, micro_batches, {}):
        assert differ == []
        assert found == IN_BLOCKS | {"model.head.weight"}
        assert before == set()


BLOCKS = {f"model.blocks.{number}.{layer}.weight" for number in (0, 1) for layer in ("up", "down")}
HEAD = {"model.head.weight"}
WHOLE = dict(reshard_after_forward=False)
# Of each model what travels in bfloat16: a tied table is read by its embedding, and what a forward outside of autocast uses is not rounded.
CASES = [
    ("twice", {}, BLOCKS | HEAD),
    ("tied", WHOLE, BLOCKS),
    ("first in float32", {}, set()),
    ("looked at", WHOLE, set()),
    ("separate, later partly", {}, set()),
]
MORE = [
    ("separate, later first in float32", WHOLE, set()),
    ("chunked", WHOLE, BLOCKS | HEAD),
    ("direct", {}, BLOCKS | HEAD),
    ("recomputed", {}, BLOCKS | HEAD),
    ("handed", {}, BLOCKS | HEAD),
    ("partly", {}, set()),
    ("looked at again", {}, BLOCKS | HEAD),
]


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        *(pytest.param(*each, id=each[0]) for each in CASES),
        *(pytest.param(*each, marks=pytest.mark.slow, id=each[0]) for each in MORE),
    ],
)
def test_no_bit_changes_however_weights_are_used(pools, kind, options, expected):
    for differ, found, _ in pools(2).run(ranks.law, kind, (2,), 2, options):
        assert differ == []
        assert found == expected


def test_a_gather_sends_half_the_bytes_of_these_weights(pools):
    for before, now, saved in pools(2).run(ranks.sent, (2,)):
        assert before - now == saved > 0


def test_a_weight_that_is_read_later_is_refused_by_name(pools):
    for message, decided in pools(2).run(ranks.late):
        assert decided == len(IN_BLOCKS) + 1
        assert message.startswith(
            "model.blocks.0.parts.linear.layer.weight is read in torch.float32 (aten.mean.default)"
        )
        assert "gather_dtype='float32'" in message
