"""Predictions, and what a step keeps for later, as of one device: whole sequences; predictions of all samples, in the dataset's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.data.batch.digest import digest
from lightning_sp.data.batch.sharding import unshard
from lightning_sp.data.loaders.replace_sampler import is_filler_batch
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor
from lightning_sp.mesh import SequenceMesh

# Elements of which a digest is made at once: the copies it needs stay small beside the logits of a long sequence.
DIGEST_ELEMENTS = 1 << 22


class TensorDigest(NamedTuple):
    """A tensor's shape, and numbers that differ, almost surely, where its elements do."""

    shape: tuple[int, ...]
    numbers: tuple[int, ...]


def unsharded_output(
    output: Any,
    batch: SequenceInfo,
    unshard: Callable[[Tensor], Tensor],
    sequence_group: ProcessGroup,
    control_group: ProcessGroup | None,
    does: str = "predict_step returns",
    left: Callable[[str], None] | None = None,
) -> Any:
    """Return what a step returned or kept, with every tensor whole that carries this rank's tokens. Every rank must call it.

    A tensor that all ranks of a sequence hold alike is whole already, unless it may be a constant for each token.

    Args:
        output: tensors in any nest of tuples, lists and dicts.
        batch: what was whole before it was sharded.
        unshard: gathers the tokens of a tensor of shape (rows, tokens of this rank, ...).
        sequence_group: the ranks that share the sequence, on a backend for host objects.
        control_group: the world, on such a backend.
        does: what the step does with them, for a message.
        left: told of the first tensor that cannot be made whole, which is left as it is; None raises.

    Communicates: shapes and digests of all tensors over the sequence's ranks; one all_gather for each tensor of tokens.

    Raises:
        SequenceParallelError: a tensor that differs between the ranks of a sequence and is not one of tokens.
    """
    size = comm.size_of(sequence_group)
    if size == 1 or batch.is_whole:
        return output
    tensors: list[Tensor] = []
    apply_to_collection(output, Tensor, tensors.append)
    gathered = comm.gather_objects([tuple(_digest(each)) for each in tensors], sequence_group)
    digests = [[TensorDigest(*each) for each in of_rank] for of_rank in gathered]
    tokens = {(each.rows, each.padded_length // size) for each in batch.all_sequences}
    fault, counts = _fault(digests, tokens, does), {len(each) for each in digests}
    comm.agree(fault if left is None or len(counts) > 1 else None, control_group)
    if left is not None and fault is not None:
        left(fault)
    alike = iter([all(other[index] == own for other in digests) for index, own in enumerate(digests[0])])

    def whole(tensor: Tensor) -> Tensor:
        is_whole = next(alike) and not _is_constant(tensor)
        return tensor if is_whole or tuple(tensor.shape[:2]) not in tokens else unshard(tensor)

    return apply_to_collection(output, Tensor, whole)


def whole_outputs(
    output: Any,
    sequence_group: ProcessGroup,
    control_group: ProcessGroup | None,
    does: str = "predict_step returns",
) -> Any:
    """Return what a step in the global view gave with whole sequences. Every rank must call it.

    Args:
        output: tensors in any nest of tuples, lists and dicts.
        sequence_group: the ranks that share the sequence, on a backend for host objects.
        control_group: the world, on such a backend.
        does: what the step does with them, for a message.

    Communicates: numbers of tensors over the sequence's ranks; one all_gather for each tensor of the sequence.

    Raises:
        SequenceParallelError: a rank of a sequence has more of them than another.
    """
    tensors: list[Tensor] = []
    apply_to_collection(output, SequenceTensor, tensors.append)
    counts = comm.gather_objects(len(tensors), sequence_group)
    comm.agree(None if len(set(counts)) == 1 else _other_counts(counts, does), control_group)
    return apply_to_collection(output, SequenceTensor, SequenceTensor.whole)


def _other_counts(counts: list[int], does: str) -> str:
    return f"{does} {counts} tensors on the {len(counts)} ranks of one sequence: there must be as many on each"


def _digest(tensor: Tensor) -> TensorDigest:
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
    return TensorDigest(tuple(tensor.shape), tuple(digest(part) for part in torch.split(flat, DIGEST_ELEMENTS)))


def _fault(digests: list[list[TensorDigest]], tokens: set[tuple[int, int]], does: str) -> str | None:
    """Return what cannot be made whole, the same on all ranks of the sequence; None where all can."""
    counts = [len(each) for each in digests]
    if len(set(counts)) > 1:
        return _other_counts(counts, does)
    for index, parts in enumerate(zip(*digests, strict=True)):
        shapes = [part.shape for part in parts]
        if len(set(parts)) > 1 and any(shape[:2] not in tokens or shape[2:] != shapes[0][2:] for shape in shapes):
            described = shapes[0] if len(set(shapes)) == 1 else ", ".join(map(str, shapes))
            return (
                f"{does} as tensor {index} of {counts[0]} one of shape {described} that differs between the "
                f"{len(digests)} ranks of one sequence: it was computed from each rank's part of the tokens, and only "
                f"tensors of shape (rows, tokens, ...), here {' or '.join(map(str, sorted(tokens)))}, can be "
                "gathered; make the tensor that has the tokens whole first, self.trainer.strategy.unshard(tensor), and compute from that"
            )
    return None


def _is_constant(tensor: Tensor) -> bool:
    """Return whether all tokens of a tensor (rows, tokens, ...) have the same."""
    return tensor.dim() >= 2 and bool((tensor == tensor[:, :1]).all())


def unshard_tokens(
    tensor: Tensor, batch: SequenceInfo | None, mesh: SequenceMesh, groups: comm.HostGroups, *, dim: int
) -> Tensor:
    """Return whole sequences from every rank's part, without padding, in global order.

    Args:
        tensor: this rank's, with its tokens along `dim`.
        batch: what was whole before it was sharded; None leaves the padding.
        mesh: with the batch's layout.
        groups: for a tensor on the host: on CUDA the devices' group takes none.
        dim: of the tokens.

    Shapes: (..., s, ...) -> (..., S, ...). Communicates: one all_gather over the sequence's ranks.
    """
    layout, length = mesh.layout, None
    if batch is not None:
        lengths = {each.padded_length // layout.size: each.length for each in reversed(batch.all_sequences)}
        length = lengths.get(tensor.shape[dim], batch.length)
    group = groups.sequence if tensor.device.type == "cpu" else mesh.sequence_group
    return unshard(tensor, layout, group, dim=dim, length=length)


def share_predictions(loop: Any, mesh: SequenceMesh, group: ProcessGroup | None) -> None:
    """Give every rank the predictions of all data-parallel ranks, in place: batch i came from rank i % data_parallel_size.

    Args:
        loop: the trainer's prediction loop, at its end.
        mesh: with this rank's coordinates.
        group: the world, on a backend for host objects.
    """
    if mesh.data_parallel_size == 1 or not loop.return_predictions or loop._combined_loader is None:
        return
    for predictions, loader in zip(loop._predictions, loop._combined_loader.flattened, strict=True):
        own = [p for index, p in enumerate(predictions) if not is_filler_batch(loader, index)]
        lists = dict(comm.gather_objects((mesh.data_parallel_rank, own), group))
        longest = max(len(each) for each in lists.values())
        predictions[:] = [lists[rank][i] for i in range(longest) for rank in sorted(lists) if i < len(lists[rank])]
