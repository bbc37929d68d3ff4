"""Steps that leave tensors for a later one: each sample's predictions, a memory of the last segment. A second step on the same rows reads them.

if row in self.kept: loss = loss + kl(logits, self.kept[row])      no first step sees this line
self.kept[row] = logits.detach()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_sp import comm
from lightning_sp.context.streams import streams
from lightning_sp.parallelize import abandon_forward
from lightning_sp.preflight.moved_weights import moved_weights
from lightning_sp.preflight.outcome import Outcome
from lightning_sp.preflight.recording.attributes import ATTRIBUTE
from lightning_sp.preflight.trial import Trial

_OF_TOKENS = " of shape "
# Of each weight.
_MOVED = 0.5


def second_step(trial: Trial, sharded: Outcome) -> Trial | None:
    """Return the trial of a second step on the same crop, if any rank's first one has left tensors; else None. Every rank must call it.

    Args:
        trial: of the first step.
        sharded: what that gave on shards.
    """
    leaves = any(name.endswith(ATTRIBUTE) and _OF_TOKENS in name for name in sharded.numbers)
    if not any(comm.gather_objects(leaves, trial.control_group)):
        return None
    run_group, group = trial.of_group
    return replace(
        trial,
        crop=f"{trial.crop} in a second step",
        run_whole=_twice(trial.run_whole, trial),
        run_sharded=_twice(trial.run_sharded, trial),
        of_group=(_twice(run_group, trial), group),
    )


def _twice(run: Callable[[], Any], trial: Trial) -> Callable[[], Any]:
    """Return a step behind another one of other weights: by the same ones a prediction is what it was, and no slope shows."""

    def second() -> Any:
        # Each step on shards begins its random numbers by the trial's seed: so does the second one of a whole run.
        with moved_weights(trial.module, 0, _MOVED), streams(trial.device):
            run()
            abandon_forward(trial.module)
        return run()

    return second
