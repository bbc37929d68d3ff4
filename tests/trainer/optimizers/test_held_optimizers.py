"""An optimizer that the run's own one holds is left by a trial as it was."""

from __future__ import annotations

from tests.trainer.optimizers import held_optimizers_ranks as ranks


def test_the_momentum_of_an_optimizer_within_another_begins_with_the_first_step(pools):
    """A trial's `second_step` stepped it, and what it had then of a momentum stayed."""
    plain = ranks.fit(1)
    for found in pools(2).run(ranks.fit, 2):
        for name, each in plain.items():
            assert (found[name] - each).abs().max() <= 1e-10, name
