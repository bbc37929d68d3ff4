"""`torch.autograd.grad` in a step that sees whole sequences: FreeLB, FGM, VAT, a gradient penalty, a saliency.

Each rank has a loss alike. Collectives have true adjoints: a backward of each rank's loss gives the gradient of their sum. So each begins with
its part of 1, which gives a tensor of the sequence its own gradient, each token's on its rank; of a whole tensor the ranks add theirs up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.global_view.tensors.deferred import made
from lightning_sp.global_view.tensors.placement import Placement, part_of
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor

UNUSED = "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is the desired behavior."


def gradients_of_step(
    original: Callable[..., Any],
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    seeds: Sequence[Tensor | None],
    *,
    sequence_group: ProcessGroup | None,
    num_groups: int,
    allow_unused: bool,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """Return one device's gradients, those of the sequence as tensors of the sequence.

    Args:
        original: torch's own function.
        outputs: whole ones, or of the sequence.
        inputs: likewise.
        seeds: of the outputs, as torch's `grad_outputs`.
        sequence_group: the ranks that share the sequence.
        num_groups: data-parallel groups, whose losses are averaged.
        allow_unused: whether an input may have no gradient.
        options: `retain_graph`, `create_graph`.

    Communicates: what a backward does, and for each whole input an all_reduce.
    """
    num_ranks = comm.size_of(sequence_group)
    # A mean over all groups' tokens, which each of them has: their seeds meet where they are added up.
    is_of_all = num_groups > 1 and any(
        comm.is_summed_over(each.grad_fn, num_ranks * num_groups) for each in map(_local, outputs)
    )
    share = 1 / (num_ranks * (num_groups if is_of_all else 1))
    begun = [_seed(output, seed, share) for output, seed in zip(outputs, seeds, strict=True)]
    found = original([*map(_local, outputs)], [*map(_local, inputs)], begun, allow_unused=True, **options)
    # Where a rank's own tokens need an input not, another's may.
    used = comm.largest(
        torch.tensor([each is not None for each in found], dtype=torch.uint8, device=_local(inputs[0]).device),
        sequence_group,
    )
    gradients: list[Tensor | None] = []
    for given, gradient, is_used in zip(inputs, found, used.tolist(), strict=True):
        if not is_used:
            if not allow_unused:
                raise RuntimeError(UNUSED)
            gradients.append(None)
            continue
        local = torch.zeros_like(_local(given)) if gradient is None else gradient
        if isinstance(given, SequenceTensor):
            gradients.append(SequenceTensor(local, given.placement))
        elif isinstance(given, nn.Parameter):
            total = comm.sum_over_ranks(local)
            gradients.append(total if is_of_all else total / num_groups)
        else:
            gradients.append(comm.sum_over_ranks(local, sequence_group))
    return tuple(gradients)


def _local(value: Tensor) -> Tensor:
    return made(value.local) if isinstance(value, SequenceTensor) else value


def _seed(output: Tensor, given: Tensor | None, share: float) -> Tensor:
    """Return what a rank's backward begins with."""
    if isinstance(output, SequenceTensor):
        if given is None:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return output.placement.without_padding(_part(given, output.placement), 0)
    if given is None:
        if output.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return torch.full_like(output, share)
    return (given.whole() if isinstance(given, SequenceTensor) else given) * share


def _part(given: Tensor, placement: Placement) -> Tensor:
    return given.local if isinstance(given, SequenceTensor) else part_of(given, placement)
