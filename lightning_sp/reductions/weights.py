"""Which tokens a reduction takes, with what weight: a mask's, none of our padding, and by document."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.errors import SequenceParallelError
from lightning_sp.reductions.scope import Scope, refuse_together


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """This rank's tokens of a reduction over the sequence.

    Args:
        values: (B, s, ...), zero where the weight is, in the dtype that sums are made in.
        weight: (B, s, 1, ...), zero for tokens that are left out; None where all count once.
        sequence: whose tokens they are; None on one device.
        scope: the step in progress; None for plain torch.
    """

    values: Tensor
    weight: Tensor | None
    sequence: SequenceInfo | None
    scope: Scope | None

    def add_up(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks of the sequence. Communicates: one all_reduce."""
        return tensor if self.scope is None else comm.sum_over_ranks(tensor, self.scope.sequence_group)

    def largest(self, tensor: Tensor) -> Tensor:
        """Return the largest over the ranks of the sequence. Communicates: one all_reduce."""
        return tensor.detach() if self.scope is None else comm.largest(tensor, self.scope.sequence_group)


def tokens_of(x: Tensor, mask: Tensor | None, dim: int, scope: Scope | None, function: str) -> Tokens:
    """Return the tokens of a tensor that a reduction takes.

    Args:
        x: tokens along `dim`.
        mask: (B, s), or as many dims as `x` with the tokens along the same one.
        dim: of the tokens.
        scope: the step in progress.
        function: for errors.
    """
    dim = dim % x.dim()
    sequence = None
    if scope is not None and scope.size > 1:
        sequence = scope.sequence(x, dim, function)
    else:
        scope = None
    values = x.movedim(dim, 1).to(sum_dtype(x))
    weight = None
    if mask is not None:
        if mask.dim() == x.dim() and mask.dim() > 2:
            mask = mask.movedim(dim, 1)
        weight = aligned(mask, values, function)
    if sequence is not None and scope is not None:
        real = scope.real_tokens(sequence, x.device)
        if real is not None:
            real = real.view(1, -1, *[1] * (values.dim() - 2))
            weight = real if weight is None else torch.where(real, weight, torch.zeros_like(weight))
    if weight is not None:
        # What is left out may be infinite or nan.
        values = torch.where(weight != 0, values, torch.zeros_like(values))
    return Tokens(values=values, weight=weight, sequence=sequence, scope=scope)


def sum_dtype(x: Tensor) -> torch.dtype:
    """Return what sums of a tensor are made in: float32 or more, int64 for whole numbers."""
    return torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else torch.int64


def aligned(mask: Tensor, values: Tensor, function: str) -> Tensor:
    """Return a mask with as many dims as the values.

    Raises:
        SequenceParallelError: its first dims are not those of the values.
    """
    shape = tuple(mask.shape)
    fits = mask.dim() <= values.dim() and all(a in (1, b) for a, b in zip(shape, values.shape, strict=False))
    if not fits:
        raise SequenceParallelError(
            f"{function}: a mask {shape} for a tensor {tuple(values.shape)}: its dims must be the first ones of the tensor's"
        )
    return mask.view(*shape, *[1] * (values.dim() - mask.dim()))


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents that a reduction is made for, each for itself.

    Args:
        ids: of each token, (B, s), 0 where it has none.
        inside: which tokens have one, (B, s).
        count: of the row that has most.
    """

    ids: Tensor
    inside: Tensor
    count: int

    @classmethod
    def of(cls, ids: Tensor, count: int | None, tokens: Tokens) -> Documents:
        """Return the documents of these numbers.

        Raises:
            SequenceParallelError: there are more than `count`.
        """
        if tuple(ids.shape) != tuple(tokens.values.shape[:2]):
            raise SequenceParallelError(
                f"documents {tuple(ids.shape)} for tokens {tuple(tokens.values.shape[:2])}: each token must have the number of its document"
            )
        found = int(tokens.largest(ids.max())) + 1
        error = f"num_documents={count}, but a token is of document {found - 1}: documents are numbered from 0"
        refuse_together(error if count is not None and found > count else None, tokens.scope)
        inside = ids >= 0
        return cls(ids=ids.clamp(min=0).long(), inside=inside, count=found if count is None else count)

    def index(self, values: Tensor) -> Tensor:
        """Return the numbers in the shape of values (B, s, ...)."""
        return self.ids.view(*self.ids.shape, *[1] * (values.dim() - 2)).expand_as(values)

    def sums(self, values: Tensor) -> Tensor:
        """Return this rank's sums by document. Shapes: (B, s, ...) -> (B, N, ...)."""
        inside = self.inside.view(*self.inside.shape, *[1] * (values.dim() - 2))
        empty = values.new_zeros(values.shape[0], self.count, *values.shape[2:])
        return empty.scatter_add(1, self.index(values), torch.where(inside, values, torch.zeros_like(values)))
