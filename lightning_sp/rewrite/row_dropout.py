"""Elementwise dropout of what the ranks of a sequence hold alike: a pooled state of each row, a whole sequence.

Each rank drops tokens of its own from a stream of its own. Of what a reduction made for all ranks, each would drop other elements, and the
ranks would go on with other numbers for the same row. Here the mask is a hash of where an element lies, as attention dropout's is: the same on
all ranks, and at all degrees above one.

Not reached: dropout in compiled code, which the comparison of the ranks' losses finds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sp.attention.spec.positions import ScorePositions
from lightning_sp.context.step import SequenceContext, Step
from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.tensors.sequence_tensor import GlobalTensor
from lightning_sp.reductions.scope import has_tokens
from lightning_sp.rewrite.dropout import attention_dropout, refuse_split_dropout
from lightning_sp.rewrite.rebind import BoundNames

# Of a batch's rows, one behind the other, in what a step puts through a model at once: chosen and rejected answers.
_MOST_REPEATS = 2


class RowDropoutInterception(AbstractContextManager[None]):
    """Makes `F.dropout` of what ranks hold alike the same on all of them while the context has a step in progress, until it exits."""

    def __init__(self, context: SequenceContext, names: BoundNames) -> None:
        self.context, self._names = context, names
        self._undo = ExitStack()
        self._original: Callable[..., Tensor] | None = None

    def __enter__(self) -> None:
        assert self._original is None
        self._original = F.dropout
        F.dropout = self._dropout
        self._names.rebind_to(self._original, self._dropout, self._undo)

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        if self._original is not None:
            F.dropout = self._original
            self._original = None

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        assert self._original is not None
        if torch.compiler.is_compiling() or not training or not 0 < p < 1 or isinstance(input, GlobalTensor):
            return self._original(input, p, training, inplace)
        step = self.context.step
        refuse_split_dropout(self.context, f"dropout {p}")
        if step is None or self.context.mesh.layout.size == 1 or not (repeats := self._repeats(input, step)):
            return self._original(input, p, training, inplace)
        if step.batch.dropout is None:
            raise SequenceParallelError(
                f"dropout {p} of a tensor {tuple(input.shape)} in an evaluation step, which the ranks of a sequence hold alike: no dropout is "
                "drawn alike there, and they would go on with other numbers for the same row; evaluate in eval mode"
            )
        dropout = attention_dropout(self.context, p)
        if dropout is None:
            return self._original(input, p, training, inplace)
        rows, elements = step.batch.rows, input[0].numel()
        keep = dropout.keep(
            ScorePositions(
                rows=(0, rows),
                heads=(0, repeats),
                queries=torch.zeros(1, dtype=torch.int64, device=input.device),
                keys=torch.arange(elements, device=input.device),
            )
        )
        # Row i of the batch in each of its repeats: (rows, repeats, 1, elements) -> (repeats * rows, ...).
        scaled = keep.transpose(0, 1).reshape(input.shape).to(input.dtype) / (1 - p)
        return input.mul_(scaled) if inplace else input * scaled

    def _repeats(self, tensor: Tensor, step: Step) -> int:
        """Return how often a tensor has the rows, alike on all ranks of the sequence; 0 where it is of this rank's tokens, or else."""
        rows, size = step.batch.rows, self.context.mesh.layout.size
        if not step.num_reductions or tensor.dim() < 2 or tensor.numel() == 0 or tensor.shape[0] % rows:
            return 0
        sequences = step.batch.sequences
        if tensor.dim() > 2 and not any(tensor.shape[1] == each.length for each in sequences):
            return 0  # neither a state of each row nor whole sequences: (B, C, s), say
        # A state of each row may be as wide as this rank has tokens.
        of_rows = tensor if tensor.dim() > 2 else tensor[:, 0]
        if any(has_tokens(of_rows, rows, each.padded_length // size) for each in sequences):
            return 0
        repeats = tensor.shape[0] // rows
        return repeats if repeats <= _MOST_REPEATS else 0
