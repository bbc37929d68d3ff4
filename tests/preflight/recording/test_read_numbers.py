"""A step that decides by a number of its batch reads whole sequences; one that only reads numbers sees its part."""

from __future__ import annotations

import pytest
import torch

from lightning_sp.preflight.recording.hidden_terms import Call
from lightning_sp.preflight.recording.numbers_read.forced_numbers import _of_more_tokens
from lightning_sp.preflight.recording.numbers_read.lines_of_parts import Line, numbers_of_groups
from lightning_sp.preflight.recording.numbers_read.read_numbers import Read, ReadNumbers
from tests.preflight.recording import read_numbers_ranks as ranks
from tests.slow import slow
from tests.trainer.tiny import VOCAB

RING, ULYSSES = {"ring_size": 2}, {"ulysses_size": 2}
DECIDING = [
    "count",
    "item",
    "int",
    "size",
    "rows",
    "numel",
    "product",
    "prod",
    "rare",
    "where",
    "weight",
    "steps",
    "bounded",
    "divided",
    "numpy",
    "array",
    "set",
    "counter",
    "number of numpy",
    "each row",
    "rare of Python",
    "both",
    "one of two",
    "levels",
    "rate",
    "phase",
    "flag of a hook",
    "hugging face",
    "logits",
    "losses of tokens",
    "layer",
    "activation",
    "transferred",
    "last of Python",
    "loop",
    "broken off",
    "name of a function",
    "bisect",
    "text",
    "rounds",
    "key",
    *ranks.OF_LAYERS,
]


def assert_same(found, plain):
    assert found["error"] == ""
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-10)
    for name, weight in plain["weights"].items():
        assert (found["weights"][name] - weight).abs().max() <= 1e-10, name


# What decides as others do, by another function or of another value: the slow run has it.
VARIANTS = {
    "array", "both", "bounded", "counter", "divided", "int", "number of numpy", "numel", "phase", "prod", "rare of Python", "rows",
    "size", "weight", "item", "where", "numpy", "each row", "losses of tokens",
    "broken off", "bisect", "rounds", "fraction of a layer",
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=[pytest.mark.slow] * (each in VARIANTS)) for each in DECIDING]
)
def test_a_step_that_decides_by_a_number_of_its_batch_reads_whole_sequences(pools, kind):
    [plain] = pools(1).run(ranks.fit, kind, None)
    for found in pools(2).run(ranks.fit, kind, RING if DECIDING.index(kind) % 2 else ULYSSES):
        assert_same(found, plain)
        assert found["whole"]


GROUPS = {"data_parallel_size": 2, "ring_size": 2}


@pytest.mark.slow
def test_each_data_parallel_group_decides_by_its_own_rows_about_its_own_loss_as_ddp_does(pools):
    [plain] = pools(1).run(ranks.fit, "mean of a group", None, 2)
    for found in pools(4).run(ranks.fit, "mean of a group", GROUPS, 2):
        assert_same({**found, "losses": plain["losses"]}, plain)
        assert found["whole"]


@pytest.mark.parametrize("view", ["auto", *slow(True)])
def test_by_its_own_rows_it_may_not_decide_about_a_loss_of_all_groups(pools, view):
    for found in pools(4).run(ranks.fit, "count of a group", {**GROUPS, "global_view": view}, 2):
        assert "decides by a number of its tokens, at read_numbers_ranks.py:" in found["error"]
        assert "about a loss that is of all groups' tokens" in found["error"]


@pytest.mark.parametrize("kind", ["tokens", "dealing", *slow("distinct", "logged", "experts")])
def test_a_step_that_decides_nothing_by_its_numbers_is_not_refused(pools, kind):
    """It sees its part, but for one that logs a number of its tokens."""
    [plain] = pools(1).run(ranks.fit, kind, None)
    for found in pools(2).run(ranks.fit, kind, RING):
        assert_same(found, plain)
        assert found["whole"] == (kind in ("distinct", "logged"))


def test_a_layer_that_would_cut_tokens_if_it_had_more_is_no_dealing_out(pools):
    for found in pools(2).run(ranks.fit, "capacity", {"ring_size": 2, "global_view": False}):
        assert "decides by a number of its tokens, at read_numbers_ranks.py:" in found["error"]
        assert '(if self.kind == "capacity" and len(mine) > 40:)' in found["error"]


@pytest.mark.slow
def test_without_a_global_view_it_is_refused_with_the_line(pools):
    for found in pools(2).run(ranks.fit, "count", {"ring_size": 2, "global_view": False}):
        assert "decides by a number of its tokens, at read_numbers_ranks.py:" in found["error"]
        assert "(return large.sum() > 40)" in found["error"]
        assert "lightning_sp.reductions.batch_sum(mask.sum(1))" in found["error"]


@pytest.mark.parametrize("kind", ["count", *slow("set", "logits")])
def test_an_evaluation_that_decides_by_a_number_of_its_batch_reads_whole_sequences(pools, kind):
    [plain] = pools(1).run(ranks.evaluated, kind, None)
    for found in pools(2).run(ranks.evaluated, kind, RING):
        assert found["error"] == ""
        assert found["numbers"] == pytest.approx(plain["numbers"], rel=1e-10)
        assert all((a - b).abs().max() <= 1e-10 for a, b in zip(found["predicted"], plain["predicted"], strict=True))
        assert found["whole"]


@pytest.mark.slow
def test_without_a_global_view_it_is_warned_of_and_a_prediction_refused(pools):
    found = pools(2).run(ranks.evaluated, "count", {**RING, "global_view": False})
    assert any(
        "validation_step decides by a number of its tokens, at read_numbers_ranks.py:" in w for w in found[0]["warned"]
    )
    for each in found:
        assert "predict_step decides by a number of its tokens, at read_numbers_ranks.py:" in each["error"]


def read(numbers: dict[tuple[str, int, str, int], int], rows: int) -> ReadNumbers:
    """What a step on so many rows has noted: of each call, how many numbers it read of `ids`."""
    found = ReadNumbers()
    found.sizes["ids",] = (rows, 16)
    found.calls = {Call(*call): Read(each, frozenset({("ids",)})) for call, each in numbers.items()}
    return found


LIBRARY, OWN = "/lib/site-packages/transformers/models/qwen3_vl/modeling_qwen3_vl.py", "/home/me/train.py"


def test_a_librarys_loop_over_rows_decides_each_row_by_itself():
    """Qwen-VL counts the positions of each row in Python: with two groups, twice as often in the run on all rows."""
    whole = read({(file, 3, "item", i): 1 for file in (LIBRARY, OWN) for i in range(4)} | {(LIBRARY, 9, "gt", 0): 1}, 4)
    group = read({(file, 3, "item", i): 1 for file in (LIBRARY, OWN) for i in range(2)} | {(LIBRARY, 9, "gt", 0): 1}, 2)
    found = numbers_of_groups(whole, group)
    assert found == {Line(LIBRARY, 9, "gt", False, False): 1, Line(OWN, 3, "item", False, False): 2}


def test_a_librarys_loop_over_what_it_has_found_decides_by_none_of_it():
    """transformers' experts ask of each that has a token whether it is the last: frozen, they are followed by every function."""
    qwen = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = qwen.Qwen3MoeConfig(hidden_size=8, num_experts=4, moe_intermediate_size=4, experts_implementation="eager")
    experts, noted = qwen.Qwen3MoeExperts(config), ReadNumbers()
    tokens, chosen = torch.ones(6, 8), torch.arange(6)[:, None] % 4
    noted.hand({"x": tokens})
    with torch.no_grad(), noted:
        experts(tokens, chosen + 0 * tokens[:, :1].long(), tokens[:, :1])
    assert "greater" in {call.function for call in noted.calls}
    assert not {"eq", "__bool__"} & {call.function for call in noted.calls}


def test_of_more_tokens_a_mean_of_classes_is_small_or_large():
    classes = torch.arange(64) % 4
    means = [_of_more_tokens(classes, VOCAB, larger=larger).double().mean() for larger in (False, True)]
    assert means[0] < 0.2
    assert means[1] > 2.9
