"""A step whose loss differs between ranks is refused, whatever a trial of the next batch says: that does not repeat it."""

from __future__ import annotations

import pytest

from tests.preflight.batches import rank_losses_ranks as ranks
from tests.slow import slow


@pytest.mark.parametrize(("step", "kind"), [(2, "nan"), *slow((1, "more"), (2, "more"), (4, "nan"))])
def test_a_loss_of_one_rank_alone_ends_the_run_behind_its_step(pools, step, kind):
    for steps, said in pools(2).run(ranks.ends, step, kind):
        assert steps == step + 1
        assert said.startswith("training_step's loss differs between ranks that share a sequence: ")
