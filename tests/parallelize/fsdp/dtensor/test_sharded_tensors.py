"""Sharded parameters, used as on one device: numbers read from them, and data assigned to them."""

from __future__ import annotations

import pytest

from lightning_sp.testing import run_ranks
from tests.parallelize.fsdp.dtensor import assigned_memory_ranks, one_row_ranks
from tests.parallelize.fsdp.dtensor import sharded_tensors_ranks as ranks


def test_a_number_is_the_wholes(pools):
    for found, behind, wanted in pools(2).run(ranks.numbers):
        assert found == pytest.approx(wanted, rel=1e-14)
        assert behind == pytest.approx(wanted, rel=1e-14)


def test_assigned_data_is_what_the_forward_uses(pools):
    for doubled, restored, tripled, plain, other_shape in pools(2).run(ranks.assigned):
        assert doubled
        assert restored
        assert tripled
        assert plain.startswith("parameter.data = Tensor of shape (5, 3), where the parameter is a shard of (5, 3)")
        assert other_shape.startswith("parameter.data = DTensor of shape (5,)")


@pytest.mark.parametrize("rows", [1, 5, 6])
def test_assigned_data_is_the_weights_own_memory(pools, rows):
    """FSDP2 copied it where a rank's part is a smaller one: what was written to it then was the other rank's weight's alone."""
    found = pools(2).run(assigned_memory_ranks.assigned_memory, rows)
    for whole, sharded, _ in found:
        for ours, wanted in zip(sharded, whole, strict=True):
            assert ours == pytest.approx(wanted, rel=1e-14)
    assert found[0][2] == found[1][2]


def test_behind_a_world_dtensor_is_torchs_own():
    assert run_ranks(ranks.behind_worlds, 2) == [[True] * 5] * 2


def test_a_write_to_a_part_reaches_the_whole(pools):
    for found in pools(2).run(ranks.parts):
        assert len(found) == 33
        assert [name for name, same in found if not same] == []


def test_random_numbers_are_those_of_the_whole(pools):
    assert pools(2).run(ranks.drawn) == [[True] * 4] * 2


def test_a_plain_tensor_that_all_ranks_hold_alike_meets_a_sharded_one(pools):
    for same, refusal, is_same_behind in pools(2).run(ranks.beside_plain):
        assert [name for name, is_same in same.items() if not is_same] == []
        assert len(same) == 26
        assert refusal.startswith(
            "a tensor of shape (5, 3) that differs between ranks meets a sharded one of shape (5, 3)"
        )
        assert is_same_behind


def test_a_plain_tensor_meets_a_weight_of_one_row(pools):
    """torch takes it for what is whole on each rank, and has no write of that to a shard; and to one plain number it wrote a shard's."""
    for same in pools(2).run(one_row_ranks.of_one_row):
        assert [name for name, is_same in same.items() if not is_same] == []
        assert len(same) == 20


def test_weights_have_addresses_by_which_they_are_told_apart(pools):
    """torch's DTensor has 0 of each: a dict by addresses, which leaves tied weights out, had one weight of all."""
    assert pools(2).run(one_row_ranks.addresses) == [(5, True)] * 2


def test_what_has_no_rule_for_shards_is_done_to_the_whole(pools):
    for same in pools(2).run(ranks.without_rule):
        assert [name for name, is_same in same.items() if not is_same] == []
        assert same.keys() == ranks.WITHOUT_RULE.keys()


def test_what_has_no_rule_is_done_to_a_whole_weight_that_learns(pools):
    for same in pools(2).run(ranks.learning_without_rule):
        assert [name for name, is_same in same.items() if not is_same] == []
        assert len(same) == 8


def test_the_largest_of_a_weight_of_which_a_rank_has_nothing_is_the_wholes(pools):
    """The one rank failed, in torch's words, and the others waited for it."""
    for same in pools(2).run(ranks.of_some):
        assert [name for name, is_same in same.items() if not is_same] == []
        assert same.keys() == ranks.OF_SOME.keys()


def test_layers_that_a_hook_calls_give_plain_activations(pools):
    """`argmax` of sharded logits failed in torch, and so did a look-up of the tokens that it gave."""
    for same, (refusal, of_rows) in pools(2).run(ranks.generated):
        assert same == [True] * 10
        assert refusal.startswith(
            "linear of a weight of shape (8, 4), which is sharded outside of a step, meets a tensor that needs"
        )
        assert of_rows.startswith(
            "a tensor of shape (2,) that differs between ranks meets a sharded one of shape (8, 4)"
        )
