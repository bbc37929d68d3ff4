"""The peak of a rank's memory under each checkpoint policy, and the cheapest policy that a budget allows: pure functions of numbers.

    peak(policy, s) = base + optimizer + gathered + the most of three moments           s tokens of a rank in a step

    forward's end      gradients of the step before       + what blocks keep + what is outside of blocks, a chunk of logits
    backward's begin   what blocks keep + outside of them + one block as it is computed again, its gradients
    backward's end     this step's gradients              + one block as it is computed again, its gradients

Each is a fixed number and one for each token. Casts are copies of weights in another dtype, those that autocast makes: their gradients are in
it, too, and they are as large in a step of any length. Gradients of a block's activations are half of what it keeps: they come as what was
saved goes. Of six kinds of blocks that were looked at the most was 0.37 (docs/log/memory.md).

Two policies go on behind "full". With MLPs in tiles a block that is computed again has one tile of what is wide in its place, a fixed number of
bytes. With inputs that leave, blocks keep as many inputs as the horizon has:

    full_tiled        a block as it is computed again - what is wide in its MLPs and norms + that of one tile + what tiles give, put together;
                      its gradients likewise
    full_offloaded    so, too; and of the inputs of blocks the largest `horizon` ones

With `optimizer_in_backward` the first moment has no gradients, and the last one those of the largest unit of FSDP alone.

What is left out (buffers of messages, kernels' workspaces, an allocator's gaps) has room in that the largest blocks are taken for all, and all
that FSDP has whole for each moment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_sp.config import budget_percent, every_nth

# The cheapest in time first. Those between "none" and "selective" recompute a part of the blocks.
CANDIDATES = ("none", "every_4", "every_2", "selective", "full", "full_tiled", "full_offloaded")
# Of them, those under which all blocks recompute themselves.
LEAST = CANDIDATES[3:]
# Those of compiled blocks: of each the part that costs the least for its bytes, by the compiler. The first is as fast as "none", and smaller.
OF_COMPILED = ("none", "budget_75", "budget_50", "budget_25", "selective", "full")
# Of them, those with MLPs in tiles, as far as a model has MLPs that can be.
TILED = ("full_tiled", "full_offloaded")
GIB = 2**30
# Of what is estimated and not measured: more than any block of the models that were measured.
_ESTIMATE = 1.25
# Of what a block keeps, gradients that its backward has at once beside it.
_GRADIENTS = 0.5


@dataclass(frozen=True, kw_only=True)
class BlockBytes:
    """What one block leaves for its backward in a step.

    Args:
        kept: without a checkpoint.
        attention: of it what the attention operator returns.
        inputs: of it the block's input.
        casts: of its weights; not in `kept`. Only where it does not recompute itself.
        wide: of `kept` what tiles of its MLPs do not keep; 0 where there are none.
        tile: of one tile, whatever the step's length.
    """

    kept: int
    attention: int
    inputs: int
    casts: int = 0
    wide: int = 0
    tile: int = 0

    def under(self, how: str) -> int:
        """Return what it keeps: "none", "budget_<percent>", "selective" or "full"."""
        if (percent := budget_percent(how)) is not None:
            # The attention's results are kept beside the budget, which is of all but the inputs.
            return min(self.kept, self.inputs + self.attention + math.ceil((self.kept - self.inputs) * percent / 100))
        return {"none": self.kept, "selective": self.inputs + self.attention, "full": self.inputs}[how]

    def computed(self, policy: str) -> int:
        """Return what it has when it has been computed again under a policy, but for a tile."""
        if policy not in TILED or not self.wide:
            return self.kept
        return self.kept - self.wide + self.inputs  # what tiles give is there twice while it is put together


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """What a step leaves for its backward.

    Args:
        tokens: of the step, on this rank.
        blocks: of each block; empty for one that did not run.
        outside: of what is outside of blocks, with the copies that a loss makes.
        outside_wide: of it what tiles of norms there do not keep.
        outside_casts: of the weights there, and those that autocast keeps whatever blocks do; not in `outside`.
        horizon: inputs of blocks that are in memory at once where they leave; 0 where they cannot.
    """

    tokens: int
    blocks: tuple[BlockBytes | None, ...]
    outside: int
    outside_casts: int = 0
    horizon: int = 0
    outside_wide: int = 0

    def outside_under(self, policy: str) -> int:
        """Return what is outside of blocks under a policy."""
        return self.outside - self.outside_wide if policy in TILED else self.outside

    def offering(self, *, tiles: Sequence[bool], horizon: int) -> StepBytes:
        """Return the step where tiles and offload are at hand as they are said to be.

        Args:
            tiles: of each block, whether its MLPs can run in tiles.
            horizon: inputs in memory where they leave; 0 where they cannot.
        """
        blocks = tuple(
            b if b is None or tiled else replace(b, wide=0, tile=0) for b, tiled in zip(self.blocks, tiles, strict=True)
        )
        return replace(self, blocks=blocks, horizon=horizon, outside_wide=self.outside_wide if any(tiles) else 0)


@dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """What a rank holds whatever the step's length.

    Args:
        base: resident before the step, but for gradients: shards, buffers, what is there of the optimizer.
        gradients: this rank's shards of them; where the optimizer steps in the backward, those that are there at a time.
        optimizer: of its state, as far as it is not there.
        gathered: parameters and gradients that FSDP has whole at a time.
        loss: of a chunk of logits, while the loss and its gradient are computed of it.
        steps_in_backward: whether a step leaves no gradient to the next one's forward.
    """

    base: int
    gradients: int
    optimizer: int
    gathered: int
    loss: int = 0
    steps_in_backward: bool = False


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What a rank holds at one moment of a step of any length, in bytes.

    Args:
        fixed: whatever the tokens.
        per_token: for each token of the rank.
    """

    fixed: int
    per_token: int

    def at(self, tokens: int) -> int:
        """Return all of it, in a step of some tokens of a rank."""
        return self.fixed + self.per_token * tokens


def of_each_block(policy: str, num_blocks: int) -> list[str]:
    """Return how each block recomputes itself under a policy: "none", "budget_<percent>", "selective" or "full"."""
    every = every_nth(policy)
    if every is None:
        return ["full" if policy in TILED else policy] * num_blocks
    return ["selective" if number % every == 0 else "none" for number in range(num_blocks)]


def _run_blocks(policy: str, step: StepBytes) -> list[tuple[BlockBytes, str]]:
    return [(b, how) for b, how in zip(step.blocks, of_each_block(policy, len(step.blocks)), strict=True) if b]


def as_options(policy: str, *, tiles: bool, tier: str) -> dict[str, str]:
    """Return the options by which a user asks for a policy of `CANDIDATES` or `OF_COMPILED`.

    Args:
        policy: of them.
        tiles: whether the model has MLPs that run in tiles.
        tier: where inputs leave to.
    """
    options = {"activation_checkpointing": "full" if policy in TILED else policy}
    if policy in TILED and tiles:
        options["mlp_tile_tokens"] = "auto"
    if policy == "full_offloaded":
        options["activation_offload"] = tier
    return options


def _kept_bytes(policy: str, step: StepBytes) -> int:
    """Return what blocks keep in memory until the backward."""
    kept = [block.under(how) for block, how in _run_blocks(policy, step)]
    if policy == "full_offloaded" and step.horizon:
        kept = sorted(kept, reverse=True)[: step.horizon]
    return sum(kept)


def bytes_per_token(policy: str, step: StepBytes) -> int:
    """Return what each token of a rank adds under a policy when the backward begins."""
    pairs = _run_blocks(policy, step)
    again = max((block.computed(policy) - block.under(how) for block, how in pairs), default=0)
    gradients = _GRADIENTS * max((block.computed(policy) for block, _ in pairs), default=0)
    return math.ceil((_kept_bytes(policy, step) + again + gradients + step.outside_under(policy)) / step.tokens)


def tile_bytes(policy: str, step: StepBytes) -> int:
    """Return what one tile of an MLP has with its gradients, whatever the step's tokens; 0 where no MLP runs in tiles."""
    if policy not in TILED:
        return 0
    return math.ceil((1 + _GRADIENTS) * max((block.tile for block in step.blocks if block), default=0))


def cast_bytes(policy: str, step: StepBytes) -> int:
    """Return what casts of weights add under a policy when the backward begins, whatever its tokens."""
    pairs = _run_blocks(policy, step)
    again = max((block.casts for block, how in pairs if how != "none"), default=0)
    # The backward is in one block at a time, or outside of them.
    gradients = max((block.casts for block, _ in pairs), default=0)
    return _kept_casts(policy, step) + again + max(gradients, step.outside_casts)


def _kept_casts(policy: str, step: StepBytes) -> int:
    return sum(block.casts for block, how in _run_blocks(policy, step) if how == "none") + step.outside_casts


def step_bytes(policy: str, step: StepBytes, tokens: int) -> int:
    """Return what the activations of a step of some tokens of a rank add to what it holds, casts of weights included."""
    return cast_bytes(policy, step) + tile_bytes(policy, step) + tokens * bytes_per_token(policy, step)


def moments(policy: str, step: StepBytes, model: ModelBytes) -> tuple[Moment, Moment, Moment]:
    """Return what a rank holds under a policy at the forward's end, and at the backward's begin and end."""
    stays = model.base + model.optimizer + model.gathered
    pairs = _run_blocks(policy, step)
    kept = _kept_bytes(policy, step) + step.outside_under(policy)
    one = max((block.computed(policy) for block, _ in pairs), default=0) * (1 + _GRADIENTS)
    tile = tile_bytes(policy, step)
    one_of_casts = 2 * max(max((block.casts for block, _ in pairs), default=0), step.outside_casts)
    before = 0 if model.steps_in_backward else model.gradients
    of_loss = before + model.loss
    forward = Moment(fixed=stays + of_loss + _kept_casts(policy, step), per_token=math.ceil(kept / step.tokens))
    begin = Moment(fixed=stays + cast_bytes(policy, step) + tile, per_token=bytes_per_token(policy, step))
    end = Moment(fixed=stays + model.gradients + one_of_casts + tile, per_token=math.ceil(one / step.tokens))
    return forward, begin, end


def peak_bytes(policy: str, step: StepBytes, model: ModelBytes, tokens: int) -> int:
    """Return the peak of a step of some tokens of a rank under a policy."""
    return max(moment.at(tokens) for moment in moments(policy, step, model))


def cheapest_policy(candidates: Sequence[str], peaks: Sequence[int], budget: int) -> str | None:
    """Return the first of some policies whose peak fits the budget; None where none does."""
    return next((policy for policy, peak in zip(candidates, peaks, strict=True) if peak <= budget), None)


def estimated_step(
    block_widths: Sequence[int],
    vocabulary: int,
    element_bytes: float,
    mlps: Sequence[tuple[int, int]],
) -> StepBytes:
    """Return what one token leaves where nothing was measured.

    In a Llama's block it is 1.1 of what its matrices take in and give out, under a selective checkpoint a fifth of that, and its input a quarter
    of these. Of the logits there are three copies. An MLP leaves at least the wider side of each of its matrices.

    Args:
        block_widths: of each block, what its weight matrices take in and give out, in elements.
        vocabulary: of the logits; 0 for none.
        element_bytes: of one element, on the mean.
        mlps: of each block, the wider sides of the matrices of its MLPs, those that can run in tiles, and tokens of a tile; of others 0.
    """
    whole = [int(_ESTIMATE * width * element_bytes) for width in block_widths]
    wide = [int(width * element_bytes) for width, _ in mlps]
    blocks = tuple(
        BlockBytes(kept=each, attention=each * 3 // 20, inputs=each // 20, wide=inner, tile=inner * tokens)
        for each, inner, (_, tokens) in zip(whole, wide, mlps, strict=True)
    )
    return StepBytes(tokens=1, blocks=blocks, outside=int(3 * vocabulary * max(element_bytes, 4)))
