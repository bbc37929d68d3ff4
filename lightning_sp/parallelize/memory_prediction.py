"""The peak of a rank's memory under each checkpoint policy, and the cheapest policy that a budget allows: pure functions of numbers.

    peak(policy, s) = base + gradients + optimizer + gathered                 `ModelBytes.fixed`
                      + casts of weights that blocks keep, and those outside + of the largest block that is computed again
                             + gradients of the largest block's              `cast_bytes`
                      + s x (sum of what blocks keep + twice the largest block that is computed again + the gradients of the largest block
                             + what is outside of blocks) / s_0

A block that is computed again is there as it keeps it, and what it computes on the way. Casts are copies of weights in another dtype, those
that autocast makes: their gradients are in it, too, and they are as large in a step of any length.

s tokens of a rank in a step, s_0 those of the step that was measured. All terms are taken as if they were there at once, so that what is left
out (buffers of messages, kernels' workspaces, an allocator's gaps) has room.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_sp.config import every_nth

# The cheapest in time first. Those between "none" and "selective" recompute a part of the blocks.
CANDIDATES = ("none", "every_4", "every_2", "selective", "full")
GIB = 2**30
# Of what is estimated and not measured: more than any block of the models that were measured.
_ESTIMATE = 1.25


@dataclass(frozen=True, kw_only=True)
class BlockBytes:
    """What one block leaves for its backward in a step.

    Args:
        kept: without a checkpoint.
        attention: of it what the attention operator returns.
        inputs: of it the block's input.
        casts: of its weights; not in `kept`. Only where it does not recompute itself.
    """

    kept: int
    attention: int
    inputs: int
    casts: int = 0

    def under(self, how: str) -> int:
        """Return what it keeps: "none", "selective" or "full"."""
        return {"none": self.kept, "selective": self.inputs + self.attention, "full": self.inputs}[how]


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """What a step leaves for its backward.

    Args:
        tokens: of the step, on this rank.
        blocks: of each block; empty for one that did not run.
        outside: of what is outside of blocks, with the copies that a loss makes.
        outside_casts: of the weights there, and those that autocast keeps whatever blocks do; not in `outside`.
    """

    tokens: int
    blocks: tuple[BlockBytes | None, ...]
    outside: int
    outside_casts: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """What a rank holds whatever the step's length.

    Args:
        base: resident before the step: shards, buffers, what is there of the optimizer.
        gradients: this rank's shards of them, as far as they are not there.
        optimizer: of its state, likewise.
        gathered: parameters and gradients that FSDP has whole at a time.
    """

    base: int
    gradients: int
    optimizer: int
    gathered: int

    @property
    def fixed(self) -> int:
        """All of it."""
        return self.base + self.gradients + self.optimizer + self.gathered


def of_each_block(policy: str, num_blocks: int) -> list[str]:
    """Return how each block recomputes itself under a policy: "none", "selective" or "full"."""
    every = every_nth(policy)
    if every is None:
        return [policy] * num_blocks
    return ["selective" if number % every == 0 else "none" for number in range(num_blocks)]


def _run_blocks(policy: str, step: StepBytes) -> list[tuple[BlockBytes, str]]:
    return [(b, how) for b, how in zip(step.blocks, of_each_block(policy, len(step.blocks)), strict=True) if b]


def bytes_per_token(policy: str, step: StepBytes) -> int:
    """Return what each token of a rank adds to the peak of a step under a policy."""
    pairs = _run_blocks(policy, step)
    kept = sum(block.under(how) for block, how in pairs)
    again = 2 * max((block.kept for block, how in pairs if how != "none"), default=0)
    gradients = max((block.kept for block, _ in pairs), default=0)
    return math.ceil((kept + again + gradients + step.outside) / step.tokens)


def cast_bytes(policy: str, step: StepBytes) -> int:
    """Return what casts of weights add to the peak of a step under a policy, whatever its tokens."""
    pairs = _run_blocks(policy, step)
    kept = sum(block.casts for block, how in pairs if how == "none")
    again = max((block.casts for block, how in pairs if how != "none"), default=0)
    # The backward is in one block at a time, or outside of them.
    gradients = max((block.casts for block, _ in pairs), default=0)
    return kept + step.outside_casts + again + max(gradients, step.outside_casts)


def step_bytes(policy: str, step: StepBytes, tokens: int) -> int:
    """Return what a step of some tokens of a rank adds to what the rank holds whatever the step's length, casts of weights included."""
    return cast_bytes(policy, step) + tokens * bytes_per_token(policy, step)


def cheapest_policy(peaks: Sequence[int], budget: int) -> str | None:
    """Return the first of `CANDIDATES` whose peak fits the budget; None where none does."""
    return next((policy for policy, peak in zip(CANDIDATES, peaks, strict=True) if peak <= budget), None)


def estimated_step(block_widths: Sequence[int], vocabulary: int, element_bytes: int) -> StepBytes:
    """Return what one token leaves where nothing was measured.

    In a Llama's block it is 1.1 of what its matrices take in and give out, under a selective checkpoint a fifth of that, and its input a quarter
    of these. Of the logits there are three copies.

    Args:
        block_widths: of each block, what its weight matrices take in and give out, in elements.
        vocabulary: of the logits; 0 for none.
        element_bytes: of one element.
    """
    whole = [int(_ESTIMATE * width * element_bytes) for width in block_widths]
    blocks = tuple(BlockBytes(kept=each, attention=each * 3 // 20, inputs=each // 20) for each in whole)
    return StepBytes(tokens=1, blocks=blocks, outside=3 * vocabulary * max(element_bytes, 4))
