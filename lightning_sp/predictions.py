"""Predictions as one device would return them: whole sequences, of all samples, each once, in the order of the dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.context import BatchInfo
from lightning_sp.data.loader import filler_batch
from lightning_sp.mesh import SequenceMesh


def whole_output(output: Any, batch: BatchInfo, mesh: SequenceMesh, unshard: Callable[[Tensor], Tensor]) -> Any:
    """Return what a predict step returned, with every tensor whole that carries this rank's tokens.

    Those are the tensors of shape (rows, tokens of this rank, ...). Communicates: one all_gather for each of them.
    """
    local = batch.padded_length // mesh.layout.size

    def whole(tensor: Tensor) -> Tensor:
        return unshard(tensor) if tensor.dim() >= 2 and tensor.shape[:2] == (batch.rows, local) else tensor

    return apply_to_collection(output, Tensor, whole)


def share_predictions(loop: Any, mesh: SequenceMesh, group: ProcessGroup | None) -> None:
    """Give every rank the predictions of all data-parallel ranks, in place: batch i came from rank i % data_parallel_size.

    Args:
        loop: the trainer's prediction loop, at its end.
        mesh: this rank's place.
        group: the world, on a backend for host objects.
    """
    if mesh.data_parallel_size == 1 or not loop.return_predictions or loop._combined_loader is None:
        return
    for predictions, loader in zip(loop._predictions, loop._combined_loader.flattened, strict=True):
        own = [p for index, p in enumerate(predictions) if not filler_batch(loader, index)]
        lists = dict(comm.gather_objects((mesh.data_parallel_rank, own), group))
        longest = max(len(each) for each in lists.values())
        predictions[:] = [lists[rank][i] for i in range(longest) for rank in sorted(lists) if i < len(lists[rank])]
