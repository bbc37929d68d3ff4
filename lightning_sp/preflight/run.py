"""A step whole and the same step sharded, forward and backward, and the verdict on both.

Whole is the batch that one device would train on, the rows of all data-parallel groups; sharded is a step of training.
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
from lightning_sp.parallelize import without_checkpoints
from lightning_sp.preflight.comparison import buffer_differences, buffers_of, gradient_differences, plain_name
from lightning_sp.preflight.verdict import Agreement, Losses, judge_buffers, judge_gradients, tolerance_of
from lightning_sp.step.isolation import isolated, streams

SEED = 1234


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
        with (
            isolated(module, device),
            context.inactive(whole_batch),
            without_checkpoints(module),
            _same_stream_everywhere(device),
        ):
            on_whole, dtypes = _run_whole(module, whole, crop)
        with isolated(module, device):
            on_shards = _run_sharded(module, context, sharded)
    if (on_shards.loss is None) != (on_whole.loss is None):
        raise SequenceParallelError(
            f"preflight: training_step returns a loss for {crop} {'whole' if on_shards.loss is None else 'sharded'}, but not the other way"
        )
    if on_shards.loss is None or on_whole.loss is None:
        return None
    return _judge(module, on_whole, on_shards, crop, tolerance_of(dtypes), started)


def _judge(
    module: nn.Module, on_whole: _Outcome, on_shards: _Outcome, crop: str, tolerance: float, started: float
) -> Agreement:
    """Compare what a step gave whole and on shards."""
    assert on_whole.loss is not None
    assert on_shards.loss is not None
    reference, loss = on_whole.loss.detach(), _averaged(on_shards.loss)
    found = gradient_differences(reference, loss, on_whole.gradients, on_shards.gradients)
    losses = Losses(whole=float(reference), sharded=float(loss))
    largest = judge_gradients(module, found, losses, crop, tolerance)
    if not math.isnan(largest.difference):
        judge_buffers(
            buffer_differences(module, on_whole.buffers, on_shards.buffers, reference.device), crop, tolerance
        )
    return Agreement(
        crop=crop,
        loss=losses.whole,
        difference=largest.difference,
        worst=largest.name,
        tolerance=tolerance,
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True)
class _Outcome:
    """What a step gave, forward and backward, on this rank."""

    loss: Tensor | None
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def _run_whole(module: nn.Module, run: Callable[[], Any], crop: str) -> tuple[_Outcome, set[torch.dtype]]:
    """Return the outcome, and the floating dtypes that the step computes in."""
    try:
        with _Dtypes(module) as precision:
            loss = _loss_of_whole(run())
    except SequenceParallelError:
        raise
    except Exception as error:
        raise SequenceParallelError(
            f"preflight: training_step fails on {crop}: {type(error).__name__}: {error}; where the model needs a fixed length, set "
            "preflight_tokens to it; preflight=False trains without the check"
        ) from error
    return _Outcome(loss, _backward(module, loss), buffers_of(module)), precision.dtypes


def _run_sharded(module: nn.Module, context: SequenceContext, run: Callable[[], Any]) -> _Outcome:
    try:
        output = run()
        loss = output["loss"] if isinstance(output, Mapping) else output
        return _Outcome(loss, _backward(module, loss), buffers_of(module))
    finally:
        context.step = None


def _averaged(loss: Tensor) -> Tensor:
    """Return the loss over the ranks as FSDP averages its gradients: data-parallel groups may each have one of their own rows."""
    return comm.reduce_sum(loss) / comm.size_of(comm.world())


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
        gradients[plain_name(name)] = grad.to_local() if isinstance(grad, DTensor) else grad
    return gradients


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
        self.dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        for each in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(each, Tensor) and each.is_floating_point() and each.requires_grad:
                self.dtypes.add(each.dtype)
        return output
