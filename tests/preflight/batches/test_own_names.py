"""Entries of names of their own stay the sequence that they were found to be, through trials, views and evaluations."""

from __future__ import annotations

from tests.preflight.batches import own_names_ranks as ranks


def test_a_series_that_was_inferred_is_one_behind_a_later_trial_and_a_validation(pools):
    """A later trial, which infers nothing, took it for an entry of another length: behind the validation nothing was a sequence."""
    plain = ranks.fit(1)
    for found in pools(2).run(ranks.fit, 2):
        for name, each in plain.items():
            assert (found[name] - each).abs().max() <= 1e-10, name
