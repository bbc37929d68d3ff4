"""A tensor of the sequence while a compiler traces: what of it guards compare, and a storage whose numbers of tokens are symbols.

torch.compile sees the tensor as a wrapper around this rank's part. Its two sizes, what is shown and what is held, are symbols of their own, so
that another length is no other graph. What hangs together with a step (masks, documents, plans of moves) is not there: what asks for it is
not traced, and runs as it does without a compiler.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_sp.errors import SequenceParallelError, told_error
from lightning_sp.global_view.tensors.placement import Placement, Storage


class Metadata:
    """Where a tensor's sequence is, but for how long it is: two that are equal have the same graph.

    Args:
        placement: of the tensor; None in a copy, which guards keep longer than a step.
        kind: what is compared.
    """

    def __init__(self, placement: Placement | None, kind: tuple[Any, ...]) -> None:
        self.placement, self.kind = placement, kind

    @classmethod
    def of(cls, placement: Placement) -> Metadata:
        """Return a placement's. Where tokens lie by a table that is made for one length, that length is compared too."""
        storage, sequence = placement.storage, placement.storage.sequence
        table = None if storage.places is None else storage.places.numpy().tobytes()
        kind = (
            placement.dim, placement.outer, placement.inner, placement.has_padding, storage.layout, storage.rank, storage.draws_whole,
            storage.number, sequence.boundaries is None, sequence.documents_declared,
            None if storage.root is None else (storage.capacity, storage.block, table),
        )  # fmt: skip
        return cls(placement, kind)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Metadata) and self.kind == other.kind

    def __hash__(self) -> int:
        return hash(self.kind)

    def __deepcopy__(self, _: Any) -> Metadata:
        return Metadata(None, self.kind)


def placed_again(local: Tensor, metadata: Metadata, shown: Any) -> Placement:
    """Return the placement of a tensor that a compiler traces.

    Args:
        local: this rank's part, without numbers.
        metadata: of the tensor that it stands for.
        shown: the size of the dim as it is shown.
    """
    known = metadata.placement
    assert known is not None
    per_token = known.outer * known.inner
    held = local.shape[known.dim] // per_token if per_token > 1 else local.shape[known.dim]
    length = shown // per_token if per_token > 1 else shown
    storage = first_look(known.storage, held * known.storage.layout.size, local)
    if not known.has_padding:
        length = storage.capacity
    return replace(known, storage=storage, length=length, copied=None)


def first_look(storage: Storage, capacity: Any, local: Tensor) -> Storage:
    """Return what stands for a storage while a compiler asks for shapes alone: the same for all tensors of it in one graph."""
    mode = torch._guards.detect_fake_mode(local)
    key = ("traced", id(mode))
    if key not in storage.plans:
        made = without_step(
            storage, capacity, attend=_shape_of_attention, dispatch=_or_break(storage.dispatch), only_shapes=True
        )
        made._positions[local.device] = local.new_empty(capacity // storage.layout.size, dtype=torch.int64)
        storage.plans[key] = made, mode  # the mode lives as long as its number is a key
    found: Storage = storage.plans[key][0]
    return found


def without_step(storage: Storage, capacity: Any, **changes: Any) -> Storage:
    """Return a storage of so many tokens that knows nothing of a step."""
    layout = storage.layout
    sequence = replace(
        storage.sequence, length=capacity, padded_length=capacity, position_ids=None, shift_labels=None, attention_mask=None,
        valid=None, visible_keys=None, dropout=None, encoder=None,
    )  # fmt: skip
    return replace(
        storage, layout=layout, capacity=capacity, sequence=sequence, note_reduction=_nothing, agree=_refuse, own_draws=_no_draws,
        is_traced=True, plans={}, _positions={}, _others={}, **changes,
    )  # fmt: skip


def _nothing() -> None:
    """Note no reduction: what is traced runs later."""


def _refuse(error: str | None) -> None:
    """Refuse on this rank: what a compiler sees is the same on all."""
    if error is not None:
        raise SequenceParallelError(error)


def _no_draws() -> Any:
    raise NotTracedError("random numbers of the sequence, which each rank draws for its own tokens")


class NotTracedError(NotImplementedError):
    """What is not traced: torch.compile breaks the graph there, and the function runs as it does without."""

    def __init__(self, what: str) -> None:
        super().__init__(f"global_view: {what}: not compiled; it runs between two graphs")


def _or_break(dispatch: Any) -> Any:
    """Return what does as the table says, and breaks the graph where it cannot: a refusal comes of what is run."""

    def breaking(*args: Any) -> Any:
        try:
            return dispatch(*args)
        except NotImplementedError:
            raise
        except Exception as error:  # a refusal, or numbers that are not there: what comes of it is seen when it runs
            raise NotTracedError(told_error(error)) from error

    return breaking


def _shape_of_attention(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
    """Return an attention's output without numbers, or break the graph where it is not traced."""
    queries: Placement = given["queries"]
    if given.get("dropout"):
        raise NotTracedError("an attention with dropout, whose seed is another one in each step")
    if given.get("bias") is not None and given["bias"].requires_grad:
        raise NotTracedError("an attention with a bias that is learned, whose numbers are looked at in each step")
    sequence = queries.storage.sequence
    if sequence.boundaries is not None or sequence.documents_declared:
        raise NotTracedError("an attention within packed documents")
    is_open = not given.get("causal") and given.get("visible") is None and given.get("bias") is None
    if queries.has_padding and is_open:
        raise NotTracedError("an attention to all tokens of a padded sequence")
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, heads, tokens, value.shape[-1])
