"""`Trainer(sync_batchnorm=True)`: batch norm over the rows of all data-parallel groups, as of one device that has the whole global batch.

Of whole sequences: the global view's rules add up over a sequence, and of a batch without one every rank has all rows. A rank's part of a
sequence, padding in it, has moments that are no one's: refused there, so that the global view is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sp import comm
from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.tensors.sequence_tensor import GlobalTensor
from lightning_sp.rewrite.rebind import BoundNames


class SyncedBatchNorm(AbstractContextManager[None]):
    """Makes `F.batch_norm` in training take its moments over all data-parallel groups while the context has a step in progress, until it exits.

    Args:
        context: of the run.
        names: of the model's files that are bound to `F.batch_norm`.
    """

    def __init__(self, context: SequenceContext, names: BoundNames) -> None:
        self.context, self._names = context, names
        self._undo = ExitStack()
        self._original: Callable[..., Any] = F.batch_norm

    def __enter__(self) -> None:
        self._original = F.batch_norm
        self._undo.callback(setattr, F, "batch_norm", self._original)
        F.batch_norm = self._batch_norm
        self._names.rebind_to(self._original, self._batch_norm, self._undo)

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Norm channels. Shapes: (B, C, ...) -> the same. Communicates: two all_reduces of C + 1 and C numbers over the data-parallel groups.

        Raises:
            SequenceParallelError: of a rank's part of a sequence; of tokens as channels.
        """
        context = self.context
        group = context.run_mesh.data_group
        number = input.numel() // input.shape[1]
        if not training or context.loss_step is None or number * comm.size_of(group) < 2:
            plain: Tensor = self._original(input, running_mean, running_var, weight, bias, training, momentum, eps)
            return plain
        if context.mesh.layout.size > 1 and not context.global_view:
            raise SequenceParallelError(
                f"sync_batchnorm=True: batch norm of {tuple(input.shape)} on a rank's part of the sequence, with padding in it, would "
                "take a mean that one device never takes; global_view=True shows the step whole sequences"
            )
        dims = [dim for dim in range(input.dim()) if dim != 1]
        wide = torch.promote_types(input.dtype, torch.float32)
        x = input.to(wide)
        sums = x.sum(dims)
        if isinstance(sums, GlobalTensor):
            raise SequenceParallelError(
                f"sync_batchnorm=True: batch norm of {tuple(input.shape)} has tokens as channels, of which each rank has its own; use LayerNorm"
            )
        own = torch.full((1,), number, dtype=wide, device=sums.device)
        total = comm.sum_over_ranks(torch.cat([sums, own]), group)
        count = total[-1].detach()
        shape = [1, -1, *[1] * (input.dim() - 2)]
        centred = x - (total[:-1] / count).view(shape)
        variance = comm.sum_over_ranks(centred.square().sum(dims), group) / count
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.lerp_((total[:-1] / count).to(running_mean.dtype), momentum)
                running_var.lerp_((variance * count / (count - 1)).to(running_var.dtype), momentum)
        normed = centred * torch.rsqrt(variance + eps).view(shape)
        normed = normed if weight is None else normed * weight.view(shape)
        normed = normed if bias is None else normed + bias.view(shape)
        return normed.to(input.dtype)
