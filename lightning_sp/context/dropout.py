"""What attention dropout, a row's dropout and LayerDrop are drawn from: the seed, the step, the samples, and the number of the call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sp.errors import SequenceParallelError


@dataclass(frozen=True, eq=False)
class DropoutSource:
    """What the attention dropout of a micro-batch is drawn from, besides the number of the call: equal at all degrees.

    Args:
        seed: of the run, the same on all ranks.
        step: optimizer steps done.
        samples: number of each row among the samples of the optimizer step, (B,), int64.
        off: nothing is dropped, as in both runs of the preflight.
        micro_batch: its number in the optimizer step, the same on all ranks.
    """

    seed: int
    step: int
    samples: Tensor
    off: bool = False
    micro_batch: int = 0


class DropoutCalls:
    """Numbers the attention calls of a step that draw dropout: a recomputed call gets the number of its forward.

    A call is recognised by one draw from the CPU's random stream, which checkpoints restore before they recompute. The draws differ between
    ranks, the numbers do not.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def number(self) -> int:
        """Return the number of the call that is about to be made.

        Raises:
            SequenceParallelError: it is recomputed with another random state than its forward's.
        """
        # On the CPU: no device waits.
        drawn = int(torch.randint(2**62, (), device="cpu"))
        # torch.utils.checkpoint recognises a backward by the same number; there is no public name.
        if drawn not in self._numbers and torch._C._current_graph_task_id() != -1:
            raise SequenceParallelError(
                f"attention with dropout is recomputed in the backward, after {len(self._numbers)} calls in the forward, and the random state "
                "is not the forward's: other weights would be dropped than in the forward; leave preserve_rng_state=True in "
                "torch.utils.checkpoint.checkpoint"
            )
        return self._numbers.setdefault(drawn, len(self._numbers))
