"""Weights moved by a part of themselves, so that a run shows what depends on them: rounding, or what a step before has left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from lightning_sp.errors import SequenceParallelError


@contextmanager
def moved_weights(module: nn.Module, seed: int, part: float) -> Iterator[None]:
    """Move each weight up or down by a part of itself, alike on replicas, and put it back."""
    weights = [shard_of(each) for each in module.parameters() if each.is_floating_point()]
    before = [each.clone() for each in weights]
    for weight in weights:
        generator = torch.Generator(weight.device).manual_seed(seed)
        up = torch.randint(2, weight.shape, generator=generator, device=weight.device)
        weight.mul_(1 + part * (2 * up - 1).to(weight.dtype))
    try:
        yield
    finally:
        for weight, value in zip(weights, before, strict=True):
            weight.copy_(value)


def shard_of(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of a weight, in its memory."""
    whole = parameter.detach()
    return whole.to_local() if isinstance(whole, DTensor) else whole


@contextmanager
def parametrizations_unwritten() -> Iterator[None]:
    """Let parametrizations that a forward registers (PEFT's of experts) leave their parameters unwritten: torch sets each to itself."""
    original = parametrize._maybe_set

    def maybe_set(dest: Tensor, src: Tensor) -> None:
        if dest is not src:
            original(dest, src)

    with patch.object(parametrize, "_maybe_set", maybe_set):
        yield


def refuse_writes(before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """Refuse a forward that writes to its own parameters. Equal on all ranks, which ran the same."""
    if written := [name for name, count in after.items() if count > before.get(name, 0)]:
        raise SequenceParallelError(
            f"preflight: a forward writes to {len(written)} of its parameters: {', '.join(written[:3])}. FSDP2 has them whole there alone, and "
            "frees them with what was written; write to them in training_step, or in a hook such as on_train_batch_start, where shards are "
            "written"
        )
