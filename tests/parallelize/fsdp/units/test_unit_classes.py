"""A sharded module's class is the user's own by name, in comparisons and in tables."""

from __future__ import annotations

from tests.parallelize.fsdp.units import unit_classes_ranks as ranks


def test_a_sharded_module_is_of_the_class_that_it_was(pools):
    for found in pools(2).run(ranks.ask):
        assert all(found), found


def test_groups_of_an_optimizer_by_classes_are_one_devices(pools):
    """No block was among them, and each was stepped at the others' rate, without a word."""
    plain = ranks.fit(1)
    for found in pools(2).run(ranks.fit, 2):
        for one, other in zip(plain, found, strict=True):
            assert (one - other).abs().max() <= 1e-10


def test_lines_that_ask_by_identity_are_named(pools):
    """Not those of `__init__`, before it is sharded, nor those that ask for another class."""
    said = pools(2).run(ranks.told)[0]
    assert ": found: list[nn.Module] = [each for each in self if type(each) is Block]; " in said
    assert (
        ": found += [each for each in self if nn.Linear is each.__class__]: a sharded module is of a class that" in said
    )
    assert said.count("unit_classes_ranks.py") == 2


def test_a_method_that_fsdp2s_own_would_hide_is_refused(pools):
    for said in pools(2).run(ranks.hidden):
        assert said.startswith("Unsharding.unshard: FSDP2 gives a sharded module a method of that name")
