"""Steps that leave tensors for a later one: each sample's predictions, a memory of the last segment. A second step on the same rows reads them.

if row in self.kept: loss = loss + kl(logits, self.kept[row])      no first step sees this line
self.kept[row] = logits.detach()
if self.global_step == 0: self.first = loss.detach()               nor does one that is shown as later run without this one
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
    return behind_a_step(trial, f"{trial.crop} in a second step")


def behind_a_step(trial: Trial, crop: str, shown: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Trial:
    """Return the trial of a step behind another one of the same.

    Args:
        trial: of the step.
        crop: what is compared, in words.
        shown: what the second of both is shown, the first one not.
    """

    def twice(run: Callable[[], Any]) -> Callable[[], Any]:
        def second() -> Any:
            # Of other weights: by the same ones a prediction is what it was, and no slope shows. Each step on shards begins its random
            # numbers by the trial's seed: so does the second one of a whole run.
            with moved_weights(trial.module, 0, _MOVED), streams(trial.device):
                run()
                abandon_forward(trial.module)
            with shown():
                return run()

        return second

    run_group, group = trial.of_group
    of_group = twice(run_group), group
    return replace(
        trial, crop=crop, run_whole=twice(trial.run_whole), run_sharded=twice(trial.run_sharded), of_group=of_group
    )
