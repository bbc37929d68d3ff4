"""Comparing a step whole with the same step sharded: the loss, every gradient and every buffer that it writes, tensor by tensor.

    ||g_sharded - g_whole|| <= tolerance max(||g_whole||, FLOOR ||all of g_whole||)
    ||b_sharded - b_whole|| <= tolerance max(||b_whole - b before||, FLOOR ||b_whole||)

Whole is the batch that one device would train on, the rows of all data-parallel groups; sharded is a step of training.

Gradients are compared where FSDP left them, shard by shard; only the norms are summed over the ranks, in one small collective, so that
all ranks decide alike. The floor is for gradients that are zero but for rounding: the bias of an attention's keys, say.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_sp import comm
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.step.isolation import isolated, streams

# By the lowest precision anywhere in the step. In bfloat16 rounding alone gave up to 3e-2 (Gemma2, 24 layers; Llama and GPT 1.6e-2; no
# growth from 2 to 4 ranks), the weakest fault of the tests 1.1e-1; in float32 8e-7.
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 8e-2, torch.float16: 1e-2}
FLOOR = 1e-2
SEED = 1234


@dataclass(frozen=True)
class Agreement:
    """What a preflight found.

    Args:
        crop: what was compared, in words.
        loss: the whole crop's.
        difference: the largest relative difference of a gradient.
        worst: the parameter that has it.
        tolerance: what was allowed.
        seconds: what it cost.
    """

    crop: str
    loss: float
    difference: float
    worst: str
    tolerance: float
    seconds: float

    def describe(self) -> str:
        """Return one line."""
        if math.isnan(self.difference):
            return f"preflight: {self.crop} cannot be compared: whole, the loss is {self.loss:.6g} and a gradient is not finite"
        return (
            f"preflight: {self.crop}, whole and sharded, agree: loss {self.loss:.6g}, largest relative difference of a gradient "
            f"{self.difference:.1e} ({self.worst}; allowed {self.tolerance:.0e}), {self.seconds:.2f} s"
        )


def run_preflight(
    module: nn.Module,
    context: SequenceContext,
    *,
    whole: Callable[[], Any],
    sharded: Callable[[], Any],
    whole_batch: SequenceInfo,
    crop: str,
    device: torch.device,
) -> Agreement | None:
    """Run a step whole and sharded, forward and backward, and compare. Every rank must call it with the same samples.

    Args:
        module: the sharded module.
        context: its step in progress; switched off for the whole run.
        whole: runs training_step on the whole crop and returns what it returned.
        sharded: begins a step as in training, runs training_step on this rank's part and returns what it returned, with the loss as a mean.
        whole_batch: what the whole crop holds.
        crop: what is compared, in words.
        device: where the module is.

    Communicates: what two steps do, and one all_reduce of two float64 numbers for each parameter and buffer.

    Returns:
        What was found; None where the step returned no loss.

    Raises:
        SequenceParallelError: they differ, or the step cannot run on a crop.
    """
    started = time.perf_counter()
    # Compiling for the shapes of a crop would take minutes: what is compared is the eager step.
    # Each run starts from what the module was before the first: a counter that the step reads and moves is the same in both.
    with torch.compiler.set_stance("force_eager"):
        with isolated(module, device), context.inactive(whole_batch), _same_stream_everywhere(device):
            try:
                with _Dtypes(module) as precision:
                    reference = _loss_of_whole(whole())
            except SequenceParallelError:
                raise
            except Exception as error:
                raise SequenceParallelError(
                    f"preflight: training_step fails on {crop}: {type(error).__name__}: {error}; where the model needs a fixed length, set "
                    "preflight_tokens to it; preflight=False trains without the check"
                ) from error
            whole_gradients = _backward(module, reference)
            whole_buffers = _buffers(module)
        with isolated(module, device):
            try:
                output = sharded()
                loss = output["loss"] if isinstance(output, Mapping) else output
                gradients = _backward(module, loss)
                buffers = _buffers(module)
            finally:
                context.step = None
    if (loss is None) != (reference is None):
        raise SequenceParallelError(
            f"preflight: training_step returns a loss for {crop} {_which(loss)}, but not the other way"
        )
    if loss is None or reference is None:
        return None
    reference, loss = reference.detach(), loss.detach()
    lowest = min(precision.seen, key=lambda d: (torch.finfo(d).bits, -torch.finfo(d).eps))
    tolerance = TOLERANCES.get(lowest, max(TOLERANCES.values()))
    found = _differences(reference, loss, whole_gradients, gradients)
    difference, worst = _judge(module, found, (float(reference), float(loss)), crop, tolerance)
    if not math.isnan(difference):
        _judge_buffers(_changes(module, whole_buffers, buffers, reference.device), crop, tolerance)
    return Agreement(crop, float(reference), difference, worst, tolerance, time.perf_counter() - started)


def _loss_of_whole(output: Any) -> Tensor | None:
    loss: Tensor | None = output["loss"] if isinstance(output, Mapping) else output
    if loss is not None and isinstance(output, Mapping) and "num_tokens" in output:
        return loss / torch.as_tensor(output["num_tokens"]).clamp(min=1)
    return loss


def _backward(module: nn.Module, loss: Tensor | None) -> dict[str, Tensor | None]:
    """Return this rank's shard of every gradient, and leave none behind."""
    if loss is not None and loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = {}
    for name, parameter in module.named_parameters():
        grad, parameter.grad = parameter.grad, None
        gradients[_plain(name)] = grad.to_local() if isinstance(grad, DTensor) else grad
    return gradients


def _differences(
    reference: Tensor, loss: Tensor, whole: dict[str, Tensor | None], sharded: dict[str, Tensor | None]
) -> dict[str, tuple[float, float]]:
    """Return ||sharded - whole|| and ||whole|| of the loss (under the empty name) and of each gradient, over all ranks."""
    pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {"": (reference.detach(), loss.detach())}
    pairs |= {name: (whole[name], sharded[name]) for name in whole}
    squares = []
    for a, b in pairs.values():
        if a is None and b is None:
            squares.append(torch.zeros(2, dtype=torch.float64, device=reference.device))
            continue
        zero = torch.zeros_like(a if a is not None else b)  # type: ignore[arg-type]
        a, b = (zero if a is None else a), (zero if b is None else b)
        squares.append(torch.stack([_square(b - a), _square(a)]))
    norms = comm.reduce_sum(torch.stack(squares)).sqrt().tolist()
    return {name: (difference, norm) for name, (difference, norm) in zip(pairs, norms, strict=True)}


def _square(tensor: Tensor) -> Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype).double()
    return norm * norm


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers() if not isinstance(buffer, DTensor)}


def _changes(
    module: nn.Module, whole: dict[str, Tensor], sharded: dict[str, Tensor], device: torch.device
) -> dict[str, tuple[float, float]]:
    """Return ||sharded - whole|| and what it is measured by of each buffer, over all ranks; the module's own are as before the step."""
    before = {name: buffer for name, buffer in module.named_buffers() if not isinstance(buffer, DTensor)}
    if not before:
        return {}
    squares = torch.zeros(len(before), 2, dtype=torch.float64, device=device)
    for row, (name, old) in zip(squares, before.items(), strict=True):
        a, b = whole.get(name, old), sharded.get(name, old)
        if a.shape != b.shape:
            row[0] = math.inf
        elif not torch.equal(a, b):
            row[0] = _square(_minus(b, a))
            moved = _square(_minus(a, old)) if a.shape == old.shape else 0.0
            row[1] = max(moved, FLOOR**2 * _square(_real(a).nan_to_num(0.0, 0.0, 0.0)))
    norms = comm.reduce_sum(squares).sqrt().tolist()
    return {_plain(name): (difference, scale) for name, (difference, scale) in zip(before, norms, strict=True)}


def _real(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _minus(a: Tensor, b: Tensor) -> Tensor:
    """Return a - b of any dtype, 0 where they are equal: infinite or nan, both."""
    a, b = _real(a), _real(b)
    return (a - b).masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)


def _judge_buffers(found: dict[str, tuple[float, float]], crop: str, tolerance: float) -> None:
    wrong = {n: (e, scale) for n, (e, scale) in found.items() if not e <= tolerance * scale}
    if not wrong:
        return
    numbers = "; ".join(
        f"{name}: ||sharded - whole|| = {error:.3e}, ||change|| = {scale:.3e}"
        for name, (error, scale) in list(wrong.items())[:3]
    )
    raise SequenceParallelError(
        f"preflight: training_step on {crop} leaves {len(wrong)} of {len(found)} buffers different on shards than whole (allowed: "
        f"{tolerance:.0e} of the change): {numbers}. They are updated from this rank's tokens alone (a running statistic, a router's balance, "
        "a count of tokens), and would differ between ranks; average the update over all ranks before it is applied, or keep what training "
        "does not read in a torchmetrics metric. preflight=False switches this check off"
    )


def _judge(
    module: nn.Module,
    found: dict[str, tuple[float, float]],
    losses: tuple[float, float],
    crop: str,
    tolerance: float,
) -> tuple[float, str]:
    """Return the largest relative difference and whose it is, nan where the whole run is not finite; raise where it is too large."""
    loss_difference, loss_norm = found.pop("")
    total = math.sqrt(sum(norm**2 for _, norm in found.values()))
    relative = {name: error / max(norm, FLOOR * total, 1e-300) for name, (error, norm) in found.items()}
    worst = sorted(relative, key=lambda name: -math.inf if relative[name] != relative[name] else -relative[name])
    loss_relative = loss_difference / max(loss_norm, 1e-300)
    if not math.isfinite(total) or not math.isfinite(loss_norm):
        return math.nan, ""
    if loss_relative <= tolerance and all(relative[name] <= tolerance for name in worst):
        return (relative[worst[0]], worst[0]) if worst else (loss_relative, "the loss")
    numbers = "; ".join(
        f"{name}: ||sharded - whole|| = {found[name][0]:.3e}, ||whole|| = {found[name][1]:.3e}" for name in worst[:3]
    )
    raise SequenceParallelError(
        f"preflight: training_step on {crop} gives another result on shards than whole (allowed: {tolerance:.0e} relative). "
        f"Loss {losses[0]:.8g} whole, {losses[1]:.8g} sharded. {sum(not e <= tolerance for e in relative.values())} of "
        f"{len(relative)} gradients differ, most: {numbers}. Likely: {_causes(module)}. "
        "Training would be silently wrong; preflight=False switches this check off"
    )


def _causes(module: nn.Module) -> str:
    """Return what is known to break a sequence that is split, the module's own parts first."""
    suspects = {
        "a convolution along the sequence": (nn.modules.conv._ConvNd,),
        "a recurrence along the sequence": (nn.RNNBase, nn.RNNCellBase),
        "statistics over this rank's tokens alone": (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm),
        "pooling over this rank's tokens alone": (nn.modules.pooling._AvgPoolNd, nn.modules.pooling._MaxPoolNd,
                                                  nn.modules.pooling._AdaptiveAvgPoolNd, nn.modules.pooling._AdaptiveMaxPoolNd),
    }  # fmt: skip
    causes = []
    for cause, kinds in suspects.items():
        names = [f"{_plain(n)} ({type(m).__name__})" for n, m in module.named_modules() if isinstance(m, kinds)]
        if names:
            causes.append(f"{cause}: {', '.join(names[:3])}")
    causes.append(
        "positions made inside the model (arange over its input's length) instead of the batch's position_ids"
    )
    causes.append("labels shifted inside the model; a shift, cumulative sum, mean or pooling over the sequence")
    causes.append("a loss divided by the batch's rows, where data-parallel groups hold other rows")
    causes.append(
        "attention that lightning_sp did not see, besides one that it did; random numbers drawn in training_step"
    )
    return "; ".join(f"({index}) {cause}" for index, cause in enumerate(causes, 1))


@contextmanager
def _same_stream_everywhere(device: torch.device) -> Iterator[None]:
    """Let all ranks draw alike in the whole run; in the sharded run each draws as it will in training."""
    with streams(device):
        random.seed(SEED)
        np.random.seed(SEED)
        torch.default_generator.manual_seed(SEED)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(SEED)
        yield


class _Dtypes(TorchFunctionMode):
    """Collects the floating dtypes of what gradients flow through: the precision of the step, a model's inner upcasts included."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.seen = {p.dtype for p in module.parameters() if p.is_floating_point()}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        for each in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(each, Tensor) and each.is_floating_point() and each.requires_grad:
                self.seen.add(each.dtype)
        return output


def _which(loss: Tensor | None) -> str:
    return "whole" if loss is None else "sharded"


def _plain(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
