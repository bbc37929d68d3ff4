"""Refusing a training loss that ranks of one sequence compute otherwise: a part of it came from a shard alone.

The first loss is checked before its backward, to the bit. Every later one is compared while its backward runs: whether it is finite is read
behind that, whether ranks differ when the next step begins. A term that joins the loss later is therefore found one step after its first use.

Ranks of other data-parallel groups may have other losses: FSDP averages their gradients, as DDP does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.context.step import SequenceContext, Step
from lightning_sp.errors import SequenceParallelError
from lightning_sp.loss.operations import SeenOperations
from lightning_sp.loss.targets import POOLED
from lightning_sp.mesh import SequenceMesh

_LOSS, _ROWS, _NOT_FINITE, _NEW = range(4)
# In units of the loss' own precision: what two devices may make of the same numbers.
_ROUNDINGS = 8
# Of a batch without a sequence each rank makes the loss anew: more than devices make of the same numbers, less than other random numbers do.
_OF_WHOLE_ROWS = 1e-2
# What rounding makes of a loss that ranks of a sequence have alike.
_OF_PARTS = 1e-6


class _Comparison(NamedTuple):
    """A loss that is being compared between ranks.

    Its values: the loss, a sum over the losses of rows, 1 where the loss is not finite, and 1 where it is made of new operations, or its step
    logs a number that none before did.
    """

    spread: comm.Spread
    values: Tensor
    num_losses: int
    is_whole: bool


class LossDiffersError(SequenceParallelError):
    """A loss is another on ranks that share a sequence."""


class OfSplitWeightsError(LossDiffersError):
    """A loss is another on ranks that split weights, which have the same tokens."""


class LossCheck:
    """The check of one run's losses. A comparison is in flight from one step to the next.

    Args:
        operations: of which the losses of steps on a rank's part of the sequence were made; the first loss' are known by its trial.
    """

    def __init__(self, operations: SeenOperations) -> None:
        self._operations = operations
        self._with_others = False
        self._first = True
        self._last: _Comparison | None = None
        self._pending: _Comparison | None = None

    def check(
        self, step: Step, output: Any, mesh: SequenceMesh, group: ProcessGroup | None, *, is_tried: bool = False
    ) -> None:
        """Check the loss of a step. Every rank must call it.

        Args:
            step: the step that computed it.
            output: what training_step returned, with the loss as a mean.
            mesh: which ranks share a sequence.
            group: the world, on a backend for host objects.
            is_tried: the step is a trial's, which compares it with one device.

        Communicates: one all_reduce of 64 bytes for each data-parallel group.

        Raises:
            SequenceParallelError: the losses of ranks that share a sequence differ.
        """
        self.finish(mesh, group)
        self._last = None
        loss = output["loss"] if isinstance(output, Mapping) and "loss" in output else output
        if not mesh.splits_samples or not isinstance(loss, Tensor) or loss.numel() != 1:
            return
        # Numbers that were computed on each rank from equal ones may be rounded otherwise: all of them where ranks split weights.
        exact = self._first and not step.num_reductions and mesh.tensor_parallel_size == 1
        tolerance = 0.0 if exact else _ROUNDINGS * torch.finfo(loss.dtype).eps
        # Batches with images run towers, which a short crop may not let be told from the sequence.
        self._with_others |= bool(step.batch.other_inputs)
        is_followed = not step.batch.is_whole and not self._with_others
        is_new = is_followed and (
            self._operations.add(loss, is_tried=is_tried or self._first) or (step.logs_new and not is_tried)
        )
        compared = _compare(
            loss, step, mesh, tolerance=_OF_WHOLE_ROWS if step.batch.is_whole else tolerance, is_new=is_new
        )
        self._last = compared
        if self._first:
            _judge(compared, mesh, group)
            # One that differs is followed by trials, each of which is judged at once.
            self._first = False
        else:
            self._pending = compared

    def last_is_finite(self) -> bool:
        """Return whether no rank's last loss that was checked is nan or infinite; the same on all ranks. Waits for its comparison to arrive."""
        return self._last is None or self._last.spread.largest()[_NOT_FINITE] == 0

    def last_has_new_operations(self) -> bool:
        """Return whether some rank's last loss that was checked is made of operations that none before was; as `last_is_finite`."""
        return self._last is not None and self._last.spread.largest()[_NEW] > 0

    def check_rows(self, step: Step, mesh: SequenceMesh, group: ProcessGroup | None) -> None:
        """Check the losses over one target for each row of an evaluation step, which returns no loss. Every rank must call it.

        Raises:
            SequenceParallelError: they differ between ranks that share a sequence.
        """
        if not mesh.splits_samples or not step.row_losses:
            return
        first = step.row_losses[0]
        tolerance = _ROUNDINGS * torch.finfo(first.dtype).eps
        _judge(_compare(torch.zeros_like(first), step, mesh, tolerance=tolerance), mesh, group)

    def finish(self, mesh: SequenceMesh, group: ProcessGroup | None) -> None:
        """Read the answer about the previous loss, at the end of training too. Every rank must call it.

        Raises:
            SequenceParallelError: the ranks' losses differed.
        """
        if self._pending is not None:
            compared, self._pending = self._pending, None
            _judge(compared, mesh, group)


def check_sums(step: Step, context: SequenceContext) -> None:
    """Refuse a step whose sums of cross entropies may be over one data-parallel group or all, where no trial has told. Alike on all ranks.

    Raises:
        SequenceParallelError: it has such sums, and reductions over all groups.
    """
    groups = context.mesh.data_parallel_size
    if groups == 1 or context.sums_over_groups is not None or not (step.num_sums and step.num_over_groups):
        return
    raise SequenceParallelError(
        f"{step.num_sums} cross entropies with reduction='sum' beside batch_mean, batch_sum or gather_rows, which span all {groups} "
        "data-parallel groups: whether the sum spans one group or all depends on what it is divided by, and no preflight has compared the "
        "step. Set preflight=True, which tells them apart; or two lines: from lightning_sp.reductions import batch_sum; "
        "total = batch_sum(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction='none')), the sum over all groups"
    )


def _compare(loss: Tensor, step: Step, mesh: SequenceMesh, *, tolerance: float, is_new: bool = False) -> _Comparison:
    """Begin to compare the loss, and the sums over one target for each row as one number, within each sequence's ranks."""
    rows = sum(
        (weight * each.double() for weight, each in enumerate(step.row_losses, 1)), torch.zeros_like(loss).double()
    )
    not_finite = 1.0 - torch.isfinite(loss.detach()).double()
    new = torch.full_like(not_finite, float(is_new))
    values = torch.stack([each.detach().double().reshape(()) for each in (loss, rows, not_finite, new)])
    spread = comm.Spread(values, tolerance, mesh.data_parallel_rank, mesh.data_parallel_size)
    return _Comparison(spread, values, step.num_losses, step.batch.is_whole)


def _judge(compared: _Comparison, mesh: SequenceMesh, group: ProcessGroup | None) -> None:
    wide = compared.spread.are_too_wide()
    if not (wide[_LOSS] or wide[_ROWS]):
        return
    every = comm.gather_objects(compared.values.tolist(), group)
    if wide[_ROWS]:
        raise SequenceParallelError(
            "a cross entropy with one target for each row was given other numbers on ranks that share a sequence, in sums "
            f"{_grouped(every, _ROWS, mesh)}: a pooled head sees only this rank's tokens of each sequence; pool over all of them: {POOLED}"
        )
    if compared.is_whole:
        raise SequenceParallelError(
            f"training_step's loss differs between ranks that share a sequence: {_grouped(every, _LOSS, mesh)}; the batch holds no sequence, so "
            "they run the same rows, and drew other random numbers for them: draw in training_step or on_after_batch_transfer, from the global "
            "streams of torch, Python or numpy, or from a generator that has one seed on all ranks of a sequence; not in "
            "on_train_batch_start"
        )
    if mesh.layout.size == 1 or _differs_by_weights([values[_LOSS] for values in every], mesh):
        raise OfSplitWeightsError(
            f"training_step's loss differs between ranks that split weights: {_grouped(every, _LOSS, mesh)}; they have the same samples, and "
            "all but their parts of layers is the same on each: a part of the loss was made of what one rank alone knows, its number, its clock "
            "or its own random numbers (make it of the batch, or draw it from the global streams, which are alike on these ranks), or of its "
            "part of a weight, which a step finds that reads a gathered one: an output head's between its forward and its backward, any with "
            "reshard_after_forward=False. Compute a penalty of weights before the model is called, or use the optimizer's weight_decay"
        )
    finite = [math.isfinite(values[_LOSS]) for values in every]
    lone = ". Some ranks' alone is finite: Trainer(detect_anomaly=True) names the operation whose gradient is not"
    raise LossDiffersError(
        f"training_step's loss differs between ranks that share a sequence: {_grouped(every, _LOSS, mesh)}; a part of it was computed from "
        f"this rank's tokens alone (an auxiliary term, an MSE, a pooled head; {compared.num_losses} cross entropies were seen). Two lines "
        "make it exact: from lightning_sp.reductions import batch_mean; loss = batch_mean(F.mse_loss(output, target, reduction='none'), mask), "
        f"the mean over all ranks' tokens. For a pooled head: {POOLED}{lone if any(finite) and not all(finite) else ''}"
    )


def _differs_by_weights(losses: list[float], mesh: SequenceMesh) -> bool:
    """Return whether losses differ between ranks that split weights, and not between those that split a sequence. Pure."""
    size, of_weights = mesh.layout.size * mesh.tensor_parallel_size, mesh.tensor_parallel_size
    if of_weights == 1:
        return False
    # Those that split weights are neighbours.
    parts = [losses[i : i + size][j::of_weights] for i in range(0, len(losses), size) for j in range(of_weights)]
    return all(max(part) - min(part) <= _OF_PARTS * max(map(abs, part)) for part in parts)


def _grouped(every: list[list[float]], index: int, mesh: SequenceMesh) -> list[Any]:
    """Return one of the compared numbers of all ranks, those of a sequence together."""
    numbers, size = [values[index] for values in every], mesh.layout.size * mesh.tensor_parallel_size
    return [numbers[first : first + size] for first in range(0, len(numbers), size)] if len(numbers) > size else numbers
