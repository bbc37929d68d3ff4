"""Which step a reduction belongs to: the one in progress, of whatever strategy is set up.

A user calls a reduction with a tensor alone, as a function of torch. So each strategy enters its context here while it is set up, and a
reduction asks for the one that has a step. Without one a reduction is plain torch: outside of a step, and in the preflight's whole run.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext, Step
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout, positions
from lightning_sp.mesh import SequenceMesh

_contexts: list[SequenceContext] = []


class ReductionScope(AbstractContextManager[None]):
    """Lets reductions see the steps of a context, until it exits."""

    def __init__(self, context: SequenceContext) -> None:
        self._context = context

    def __enter__(self) -> None:
        _contexts.append(self._context)

    def __exit__(self, *_: object) -> None:
        if self._context in _contexts:
            _contexts.remove(self._context)


@dataclass(frozen=True, kw_only=True)
class Scope:
    """A step in progress, as reductions see it.

    Args:
        mesh: the process groups, and this rank's coordinates.
        step: the step in progress.
    """

    mesh: SequenceMesh
    step: Step

    @property
    def size(self) -> int:
        """How many ranks share a sequence."""
        return self.mesh.layout.size

    @property
    def is_training(self) -> bool:
        """Whether the rows of all data-parallel groups are one batch; in evaluation other groups may have none left."""
        return self.step.loss_group is None

    @property
    def is_filler(self) -> bool:
        """Whether this rank's rows count for nothing in the global batch."""
        return self.is_training and self.step.batch.is_filler

    @property
    def sequence_group(self) -> ProcessGroup:
        """The ranks that share a sequence."""
        return self.mesh.sequence_group

    @property
    def data_group(self) -> ProcessGroup | None:
        """The ranks with the same tokens of the batch's other rows; None where the batch has no others."""
        return self.mesh.data_group if self.is_training and self.mesh.data_parallel_size > 1 else None

    def local_tokens(self, sequence: SequenceInfo) -> int:
        """Return the number of a sequence's tokens on this rank."""
        return sequence.padded_length // self.size

    def sequence(self, tensor: Tensor, dim: int, function: str) -> SequenceInfo:
        """Return the sequence whose tokens on this rank a tensor has along a dim.

        Raises:
            SequenceParallelError: no sequence of the batch has as many.
        """
        sequences = self.step.batch.sequences
        if tensor.dim() > dim:
            for each in sequences:
                if self.local_tokens(each) == tensor.shape[dim]:
                    return each
        held = " or ".join(str(self.local_tokens(each)) for each in sequences)
        raise SequenceParallelError(
            f"{function} of a tensor {tuple(tensor.shape)}: dim {dim} must be this rank's tokens, {held} of {sequences[0].length}; what is "
            "whole already, or has one number for each row, needs no reduction over the sequence"
        )

    def whole_sequence(self, tensor: Tensor, dim: int, function: str) -> SequenceInfo:
        """Return the sequence that a tensor has whole along a dim.

        Raises:
            SequenceParallelError: no sequence of the batch has as many tokens.
        """
        sequences = self.step.batch.sequences
        if tensor.dim() > dim:
            for each in sequences:
                if each.length == tensor.shape[dim]:
                    return each
        held = " or ".join(str(each.length) for each in sequences)
        raise SequenceParallelError(
            f"{function} of a tensor {tuple(tensor.shape)}: dim {dim} must be the tokens of a whole sequence, {held}"
        )

    def positions(self, sequence: SequenceInfo, device: torch.device) -> Tensor:
        """Return the global positions of this rank's tokens. Shapes: () -> (s,)."""
        return positions(sequence.layout, sequence.padded_length, self.mesh.sequence_rank).to(device)

    def real_tokens(self, sequence: SequenceInfo, device: torch.device) -> Tensor | None:
        """Return which of this rank's tokens are no padding of ours, (s,); None where the sequence has none."""
        if sequence.padded_length == sequence.length:
            return None
        return self.positions(sequence, device) < sequence.length


def current_scope() -> Scope | None:
    """Return the step in progress that reductions look at; None where they are plain torch."""
    for context in reversed(_contexts):
        step = context.loss_step
        if step is not None:
            step.num_reductions += 1
            # In the global view tensors show whole sequences: what is left to add up is over data-parallel groups.
            mesh = replace(context.mesh, layout=SequenceLayout()) if context.global_view else context.mesh
            return Scope(mesh=mesh, step=step)
        if context.reference is not None:
            return None
    return None


def has_tokens(tensor: Tensor, rows: int, local: int) -> bool:
    """Return whether a tensor has a rank's `local` tokens of each row, in dim 1 or in rows one after the other."""
    # A step may put two rows for each of the batch's one after the other.
    in_rows = tensor.dim() > 1 and tensor.shape[0] % rows == 0 and tensor.shape[1] == local
    return in_rows or (tensor.dim() > 0 and local > 1 and tensor.shape[0] == rows * local)


def refuse_together(error: str | None, scope: Scope | None) -> None:
    """Raise what a rank found in its data on all ranks: those of other rows may have found nothing. Every rank of a step must call it.

    Communicates: one all_reduce of 8 bytes, inside of a step.

    Raises:
        SequenceParallelError: a rank found something.
    """
    if scope is not None:
        comm.agree(error)
    elif error:
        raise SequenceParallelError(error)
