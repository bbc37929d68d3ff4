"""Gradient accumulation: each micro-batch weighs as much as it has tokens."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_sp.context.step import Step
from lightning_sp.errors import SequenceParallelError
from lightning_sp.loss.reduction import nonzero_count

_REENTRANT = "CheckpointFunctionBackward"


class TokenWindow:
    """Makes an optimizer step's gradient the mean over all tokens of its micro-batches, however many each has.

    Each micro-batch's loss L_m is a mean over its n_m tokens. Backward sees w_m L_m / A, with w_m = n_m / n_0 and A Lightning's
    accumulate_grad_batches; before clipping the gradients are multiplied by A n_0 / sum n_m. Together: sum n_m L_m / sum n_m.
    With A = 1 nothing is multiplied. Counts stay tensors: no host sync.

    A loss without a count is L_m / A, as Lightning has it. Beside losses with counts it is refused; of whole sequences no loss is: a
    micro-batch without one count then weighs as the first that has one.

    Args:
        refuses: micro-batches of which it is not known how they weigh.
    """

    def __init__(self, *, refuses: bool = True) -> None:
        self._refuses = refuses
        self._first: Tensor | None = None
        self._total: Tensor | None = None
        self._num_uncounted = 0

    def begin(self) -> None:
        """Begin a window: of one before that was not closed, by an `optimizer_step` that steps nothing say, no tokens count."""
        self._first = self._total = None
        self._num_uncounted = 0

    def weigh(self, loss: Tensor, token_counts: list[Tensor]) -> Tensor:
        """Return w_m L_m for the loss of a micro-batch.

        Raises:
            SequenceParallelError: several losses with different counts: which one weighs the micro-batch would be a guess. Or losses with
                counts and without in one window.
        """
        if not self._refuses and not _alike(token_counts):
            token_counts = []
        self._num_uncounted += not token_counts
        if self._refuses and self._num_uncounted and (token_counts or self._first is not None):
            raise SequenceParallelError(
                "of the micro-batches of one optimizer step some have a mean cross_entropy and some have none: how they weigh against each "
                "other is not known; compute the same losses in each, or use accumulate_grad_batches=1"
            )
        if not token_counts:
            return loss
        if not _alike(token_counts):
            raise SequenceParallelError(
                f"{len(token_counts)} cross entropies with different token counts {[int(c) for c in token_counts]} in one micro-batch: with "
                "gradient accumulation their weights are ambiguous; use accumulate_grad_batches=1, or give them the same ignored labels"
            )
        count = token_counts[0]
        if self._first is None or self._total is None:
            # A first micro-batch without tokens weighs nothing, but divides the others by 1 and not by 0.
            self._first, self._total = nonzero_count(count), count
            return loss * (count / self._first)
        self._total = self._total + count
        return loss * (count / self._first)

    def close(self, accumulate: int) -> Tensor | None:
        """End the window and return the factor of the gradients, None for 1."""
        first, total = self._first, self._total
        if first is not None and total is not None:
            total = total + self._num_uncounted * first
        self.begin()
        if first is None or total is None or accumulate == 1:
            return None
        return accumulate * first / nonzero_count(total)


def counts_in(loss: Tensor, step: Step) -> list[Tensor]:
    """Return the token counts of those means that a loss is made of: one that is only logged does not weigh the micro-batch.

    Args:
        loss: of a micro-batch.
        step: whose means were counted.
    """
    if not step.means:
        return step.token_counts
    wanted = {node for node in step.means if node is not None}
    visited, left = {loss.grad_fn}, deque([loss.grad_fn])
    found: set[Any] = set()
    while left and found != wanted:
        node = left.popleft()
        if node is None:
            continue
        if node in wanted:
            found.add(node)
        elif node.name() == _REENTRANT:  # its mean was made outside of any graph
            return step.token_counts
        for other, _ in node.next_functions:
            if other is not None and other not in visited:
                visited.add(other)
                left.append(other)
    return [count for count, node in zip(step.token_counts, step.means, strict=True) if node in found]


def has_own_part(loss: Tensor, sequence_group: ProcessGroup | None) -> bool:
    """Return whether a loss reads weights otherwise than through sums over all data-parallel groups."""
    visited, left = {loss.grad_fn}, deque([loss.grad_fn])
    while left:
        node = left.popleft()
        if node is None or getattr(node, "group", sequence_group) is not sequence_group:
            continue
        if hasattr(node, "variable"):
            return True
        new = {other for other, _ in node.next_functions if other is not None} - visited
        visited |= new
        left.extend(new)
    return False


def _alike(counts: list[Tensor]) -> bool:
    return len(counts) < 2 or all(bool(torch.equal(each, counts[0])) for each in counts)


def scale_gradients(optimizer: Optimizer, factor: Tensor) -> None:
    """Multiply this rank's shard of every gradient that an optimizer is about to read, in place."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                grad.mul_(factor.to(grad))  # a shard may be the host's
