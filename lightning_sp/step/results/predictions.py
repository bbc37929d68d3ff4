"""Predictions, and what a step keeps for later, as of one device: whole sequences; predictions of all samples, in the dataset's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.token_outputs import TokenOutputs
from lightning_sp.data.batch.digest import digest
from lightning_sp.data.batch.sharding import unshard
from lightning_sp.data.loaders.replace_sampler import is_filler_batch
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor
from lightning_sp.mesh import SequenceMesh
from lightning_sp.step.results.output_structure import Path, tensors_of, with_tensors

# Elements of which a digest is made at once: the copies it needs stay small beside the logits of a long sequence.
DIGEST_ELEMENTS = 1 << 22


class KnownTokens(NamedTuple):
    """Which tensors of one output have tokens, by the way to each.

    Args:
        outputs: what is known of all.
        of: the output, in words.
    """

    outputs: TokenOutputs
    of: str

    def __call__(self, path: Path) -> bool | None:
        """Return whether one has; None where that is not known."""
        return self.outputs.are_of_tokens(self.of, path)

    def note(self, path: Path) -> None:
        """Remember one that has, for it differs between ranks."""
        self.outputs.note(self.of, path, of_tokens=True)


class _Kind(Enum):
    """What a tensor is: of tokens, whole on every rank, one of these two, or neither."""

    TOKENS, WHOLE, UNKNOWN, OTHER = range(4)


class TensorDigest(NamedTuple):
    """A tensor's shape, and numbers that differ, almost surely, where its elements do."""

    shape: tuple[int, ...]
    numbers: tuple[int, ...]


def unsharded_output(
    output: Any,
    batch: SequenceInfo,
    unshard: Callable[[Tensor], Tensor],
    groups: comm.HostGroups,
    does: str,
    known: KnownTokens,
    left: Callable[[str], None] | None = None,
) -> Any:
    """Return what a step returned or kept, with every tensor whole that carries this rank's tokens. Every rank must call it.

    Args:
        output: tensors in any nest of tuples, lists, dicts and objects of the user's own.
        batch: what was whole before it was sharded.
        unshard: gathers the tokens of a tensor of shape (rows, tokens of this rank, ...).
        groups: those that share the sequence, and the world, on a backend for host objects.
        does: what the step does with them, for a message.
        known: which of them have tokens. One that all ranks of a sequence hold alike may have any, or none.
        left: told of the first tensor that cannot be made whole, which is left as it is; None raises.

    Communicates: shapes and digests of all tensors over the sequence's ranks; one all_gather for each tensor of tokens.

    Raises:
        SequenceParallelError: a tensor that differs between the ranks of a sequence and is not one of tokens; one of which that is not known.
    """
    size = comm.size_of(groups.sequence)
    if size == 1 or batch.is_whole:
        return output
    tensors = tensors_of(output)
    gathered = comm.gather_objects([tuple(_digest(each.value)) for each in tensors], groups.sequence)
    digests = [[TensorDigest(*each) for each in of_rank] for of_rank in gathered]
    tokens = {(each.rows, each.padded_length // size) for each in batch.all_sequences}
    counts = [len(each) for each in digests]
    of_ranks = zip(*digests, strict=False)
    found = [_told(parts, tokens, known(each.path)) for each, parts in zip(tensors, of_ranks, strict=False)]
    fault = _other_counts(counts, does) if len(set(counts)) > 1 else _fault(digests, tokens, found, does)
    comm.agree(fault if left is None or len(set(counts)) > 1 else None, groups.world)
    if left is not None and fault is not None:
        left(fault)
    for each, kind in zip(tensors, found, strict=True):
        if kind is _Kind.TOKENS:
            known.note(each.path)
    kinds = iter(found)
    return with_tensors(output, lambda tensor: unshard(tensor) if next(kinds) is _Kind.TOKENS else tensor)


def whole_outputs(output: Any, groups: comm.HostGroups, does: str) -> Any:
    """Return what a step in the global view gave with whole sequences. Every rank must call it.

    Args:
        output: tensors in any nest of tuples, lists, dicts and objects of the user's own.
        groups: those that share the sequence, and the world, on a backend for host objects.
        does: what the step does with them, for a message.

    Communicates: numbers of tensors over the sequence's ranks; one all_gather for each tensor of the sequence.

    Raises:
        SequenceParallelError: a rank of a sequence has more of them than another.
    """
    tensors = [each for each in tensors_of(output) if isinstance(each.value, SequenceTensor)]
    counts = comm.gather_objects(len(tensors), groups.sequence)
    comm.agree(None if len(set(counts)) == 1 else _other_counts(counts, does), groups.world)
    return with_tensors(output, lambda tensor: tensor.whole() if isinstance(tensor, SequenceTensor) else tensor)


def _other_counts(counts: list[int], does: str) -> str:
    return f"{does} {counts} tensors on the {len(counts)} ranks of one sequence: there must be as many on each"


def _digest(tensor: Tensor) -> TensorDigest:
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
    return TensorDigest(tuple(tensor.shape), tuple(digest(part) for part in torch.split(flat, DIGEST_ELEMENTS)))


def _told(parts: Sequence[TensorDigest], tokens: set[tuple[int, int]], of_tokens: bool | None) -> _Kind:
    """Return what a tensor is of which the ranks of a sequence have these; the same on all of them."""
    shapes = [part.shape for part in parts]
    may_be_of_tokens = all(shape[:2] in tokens and shape[2:] == shapes[0][2:] for shape in shapes)
    is_alike = len(set(parts)) == 1
    if not may_be_of_tokens:
        return _Kind.WHOLE if is_alike else _Kind.OTHER
    if of_tokens is None:
        return _Kind.UNKNOWN if is_alike else _Kind.TOKENS
    return _Kind.TOKENS if of_tokens else _Kind.WHOLE if is_alike else _Kind.OTHER


def _fault(
    digests: list[list[TensorDigest]], tokens: set[tuple[int, int]], kinds: Sequence[_Kind], does: str
) -> str | None:
    """Return what cannot be made whole, the same on all ranks of the sequence; None where all can."""
    for index, (kind, parts) in enumerate(zip(kinds, zip(*digests, strict=True), strict=True)):
        if kind in (_Kind.TOKENS, _Kind.WHOLE):
            continue
        shapes = [part.shape for part in parts]
        described = shapes[0] if len(set(shapes)) == 1 else ", ".join(map(str, shapes))
        what = f"{does} as tensor {index} of {len(kinds)} one of shape {described} that"
        if kind is _Kind.UNKNOWN:
            return (
                f"{what} the {len(digests)} ranks of one sequence have alike: it is of each rank's part of the tokens, which repeat, or "
                "whole, with as many numbers as a part has tokens, and no trial has shown which. Leave preflight=True, whose trial shows "
                "it; or make what has tokens whole, self.trainer.strategy.unshard(tensor), and give what has none another shape, tensor[None]"
            )
        return (
            f"{what} differs between the "
            f"{len(digests)} ranks of one sequence: it was computed from each rank's part of the tokens, and only "
            f"tensors of shape (rows, tokens, ...), here {' or '.join(map(str, sorted(tokens)))}, can be "
            "gathered; make the tensor that has the tokens whole first, self.trainer.strategy.unshard(tensor), and compute from that"
        )
    return None


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
