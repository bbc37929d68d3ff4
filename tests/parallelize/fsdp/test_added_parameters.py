"""Parameters that a script puts into a sharded model."""

from __future__ import annotations

from tests.parallelize.fsdp import added_parameters_ranks


def test_a_parameter_that_is_to_be_trained_and_was_not_sharded_is_refused(pools):
    said = pools(2).run(added_parameters_ranks.added)
    assert said[0] == said[1]
    sharded, gathered, frozen, replaced, new, (hooked, stepped), pruned = said[0]
    assert (sharded, gathered, frozen) == ("", "", "")
    assert replaced.startswith(
        "1.weight, of shape (2, 3), was put into the model after it was sharded: FSDP2 knows another parameter there"
    )
    assert new.startswith("extra.bias, of shape (2,), was put into the model after it was sharded")
    assert hooked.startswith("0.weight has another parameter put in its place after it was sharded")
    assert stepped.startswith("weight of a Linear has another parameter put in its place after it was sharded")
    assert pruned.startswith("0.weight is no parameter of its module any more, since it was sharded (pruning")
