"""What the differences between a whole and a sharded step mean: they agree, nothing can be said, or the run is stopped with likely causes.

||g_sharded - g_whole|| <= tolerance max(||g_whole||, FLOOR ||all of g_whole||)
|l_sharded - l_whole|   <= tolerance max(|l_whole|, LOSS_FLOOR ||all of g_whole||)
||b_sharded - b_whole|| <= tolerance max(||b_whole - b before||, FLOOR ||b_whole||)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import nn

from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.comparison import FLOOR, Difference, plain_name
from lightning_sp.preflight.recording.compared import Compared, Entry

# A loss whose terms add up to 0, a policy's on its own answers, is what rounding leaves of them: its gradients say how large they are.
LOSS_FLOOR = 1e-3
# By the lowest precision anywhere in the step. In bfloat16 rounding alone gave up to 3e-2 (Gemma2, 24 layers; Llama and GPT 1.6e-2; no
# growth from 2 to 4 ranks), the weakest fault of the tests 1.1e-1; in float32 8e-7.
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 8e-2, torch.float16: 1e-2}


class ResultDiffersError(SequenceParallelError):
    """A step gives another result on shards than whole."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What a preflight found.

    Args:
        crop: what was compared, in words.
        loss: the whole crop's.
        difference: the largest relative difference of a gradient.
        worst: the parameter that has it.
        tolerance: what was allowed.
        seconds: what it cost.
        loss_of_one_device: on the rows of all data-parallel groups, where that is another number than the mean of their losses; else None.
        adds_up_rows: and it is their sum, which training steps take.
        compared: what the step compares tokens of the batch with.
    """

    crop: str
    loss: float
    difference: float
    worst: str
    tolerance: float
    seconds: float
    loss_of_one_device: float | None = None
    adds_up_rows: bool = False
    has_gradients: bool = True
    compared: Mapping[Entry, Compared] = field(default_factory=dict)

    @property
    def says_something(self) -> bool:
        """Whether numbers were compared that could have differed: finite ones, and gradients that are not all 0."""
        return self.has_gradients and not math.isnan(self.difference)

    @property
    def is_one_devices(self) -> bool:
        """Whether training steps have one device's loss."""
        return self.loss_of_one_device is None or self.adds_up_rows

    def describe(self) -> str:
        """Return one line."""
        if math.isnan(self.difference):
            return f"preflight: {self.crop} cannot be compared: whole, the loss is {self.loss:.6g} and a gradient is not finite"
        if self.adds_up_rows:
            return (
                f"preflight: {self.crop}, whole and sharded, agree where the losses of the data-parallel groups' own rows are added up: "
                f"{self.loss_of_one_device:.6g}, as one device has it; self.log shows each group's own"
            )
        if self.loss_of_one_device is not None:
            return (
                f"preflight: {self.crop}, whole and sharded, agree where each data-parallel group has a loss of its own rows, averaged "
                f"as DDP does: {self.loss:.6g}. One device on the rows of all groups has {self.loss_of_one_device:.6g}; batch_mean and "
                "gather_rows of lightning_sp.reductions make a loss global"
            )
        return (
            f"preflight: {self.crop}, whole and sharded, agree: loss {self.loss:.6g}, largest relative difference of a gradient "
            f"{self.difference:.1e} ({self.worst}; allowed {self.tolerance:.0e}), {self.seconds:.2f} s"
        )


class Finding(Protocol):
    """A cause that was found."""

    def describe(self) -> str:
        """Return one line."""


class Losses(NamedTuple):
    """Of the same step, run both ways."""

    whole: float
    sharded: float


class Largest(NamedTuple):
    """The largest relative difference, and the gradient that has it; nan where the whole run is not finite."""

    difference: float
    name: str


def tolerance_of(dtypes: Iterable[torch.dtype]) -> float:
    """Return what is allowed where a step computes in these floating dtypes: that of the lowest precision."""
    lowest = min(dtypes, key=lambda d: (torch.finfo(d).bits, -torch.finfo(d).eps))
    return TOLERANCES.get(lowest, max(TOLERANCES.values()))


def relative_differences(found: Mapping[str, Difference]) -> dict[str, float]:
    """Return how far each gradient is off, and the loss under the empty name: relative to its norm, or to a part of all gradients'."""
    total = math.sqrt(sum(each.scale**2 for name, each in found.items() if name))
    floors = {name: (FLOOR if name else LOSS_FLOOR) * total for name in found}
    return {name: error / max(norm, floors[name], 1e-300) for name, (error, norm) in found.items()}


def judge_gradients(
    module: nn.Module,
    found: Mapping[str, Difference],
    losses: Losses,
    crop: str,
    tolerance: float,
    find: Callable[[], Sequence[Finding]],
) -> Largest:
    """Return the largest relative difference of a gradient.

    Args:
        module: whose parts are named among the causes.
        found: of each gradient in the model's order, and of the loss under the empty name.
        losses: of both runs.
        crop: what was compared, in words.
        tolerance: what is allowed.
        find: looks for the causes, once there is one.

    Raises:
        ResultDiffersError: one is too large.
    """
    relative = relative_differences(found)
    loss_relative = relative.pop("")
    worst = sorted(relative, key=lambda name: -math.inf if relative[name] != relative[name] else -relative[name])
    if not all(math.isfinite(each.scale) for each in found.values()):
        return Largest(math.nan, "")
    if loss_relative <= tolerance and all(relative[name] <= tolerance for name in worst):
        return Largest(relative[worst[0]], worst[0]) if worst else Largest(loss_relative, "the loss")
    numbers = "; ".join(
        f"{name}: ||sharded - whole|| = {found[name].error:.3e}, ||whole|| = {found[name].scale:.3e}"
        for name in worst[:3]
    )
    wrong = [name for name in relative if not relative[name] <= tolerance]
    raise ResultDiffersError(
        f"preflight: training_step on {crop} gives another result on shards than whole (allowed: {tolerance:.0e} relative). "
        f"Loss {losses.whole:.8g} whole, {losses.sharded:.8g} sharded. {len(wrong)} of {len(relative)} gradients differ, most: {numbers}; first "
        f"in the model's order: {', '.join(wrong[:3])}. {_causes(module, find(), loss_relative <= tolerance)}. "
        "Training would be silently wrong; preflight=False switches this check off"
    )


def judge_buffers(found: Mapping[str, Difference], crop: str, tolerance: float) -> None:
    """Refuse buffers that a step on shards leaves different than whole.

    Raises:
        SequenceParallelError: with the first of them.
    """
    wrong = {name: each for name, each in found.items() if not each.error <= tolerance * each.scale}
    if not wrong:
        return
    numbers = "; ".join(
        f"{name}: ||sharded - whole|| = {error:.3e}, ||change|| = {scale:.3e}"
        for name, (error, scale) in list(wrong.items())[:3]
    )
    of_norm = any(name.endswith("running_var") for name in wrong)
    remedy = "Trainer(sync_batchnorm=True) has batch norm's over all ranks; " if of_norm else ""
    raise SequenceParallelError(
        f"preflight: training_step on {crop} leaves {len(wrong)} of {len(found)} buffers different on shards than whole (allowed: "
        f"{tolerance:.0e} of the change): {numbers}. They are updated from this rank's tokens alone (a running statistic, a router's balance, "
        f"a count of tokens), and would differ between ranks; {remedy}average the update over all ranks before it is applied, made of shares of "
        "a rank's tokens (counts / tokens), for in a whole run a sum over ranks has every token once for each; or keep what training does not "
        "read in a torchmetrics metric. preflight=False switches this check off"
    )


def listed(findings: Sequence[Finding]) -> str:
    """Return what was found, numbered."""
    return "; ".join(f"({index}) {each.describe()}" for index, each in enumerate(findings, 1))


def _causes(module: nn.Module, findings: Sequence[Finding], losses_agree: bool) -> str:
    """Return what was found on the crop, else what is known to break a sequence that is split."""
    if findings:
        return f"Found on the crop: {listed(findings)}"
    if losses_agree:
        return (
            "The losses agree, and no call of the forward differs: (1) a gradient that is changed on its way (a hook, a function with a "
            "backward of its own), or a term of the loss that each rank counts alone. Fix: let no backward depend on a rank's tokens"
        )
    kinds = (
        nn.modules.conv._ConvNd,
        nn.RNNBase,
        nn.modules.batchnorm._BatchNorm,
        nn.modules.instancenorm._InstanceNorm,
    )
    names = [f"{plain_name(n)} ({type(m).__name__})" for n, m in module.named_modules() if isinstance(m, kinds)]
    parts = [f"what mixes tokens along the sequence: {', '.join(names[:3])}"] if names else []
    parts.append(
        "positions made inside the model; labels shifted inside the model; targets or weights that are not the batch's"
    )
    parts.append("a mean, cumulative sum or pooling over the sequence; attention that lightning_sp did not see")
    return "Likely: " + "; ".join(f"({index}) {cause}" for index, cause in enumerate(parts, 1))
