"""A loss that each data-parallel group divides by a count of its own, with one device's gradient: each term counts by what it is divided by.

    one device         sum over groups of N_g / sum over groups of D_g
    groups averaged    mean over groups of N_g / D_g                       the same where all D_g are
    here               N_g has the factor groups / sum of D_g              in the backward; the number that a step sees is its group's

FSDP averages the groups' gradients. Whether a loss is one device's so, or as a mean of the groups', the preflight tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.context.step import SequenceContext
from lightning_sp.loss.added_constants import added_to, described
from lightning_sp.loss.own_terms import MOST_TERMS, OwnTerm, is_empty, own_terms

_ROUNDING = 1e-9


@contextmanager
def counted_terms(
    loss: Tensor, context: SequenceContext, *, is_filler: bool = False, is_normalized: bool = False
) -> Iterator[Tensor | None]:
    """Let a backward within count each group's terms by what they are divided by, where a trial has told so; give the counts of all groups.

    Every rank must enter it.

    Args:
        loss: of the group.
        context: what a trial has told; it notes the counts of a trial.
        is_filler: none of the group's rows counts.
        is_normalized: Lightning has divided it by accumulate_grad_batches.

    Communicates: 264 bytes over the data-parallel groups, in a trial and where they count so.
    """
    is_whole = context.loss_step is None or context.reference is not None
    if context.mesh.data_parallel_size == 1 or not (context.by_counts or context.is_tried):
        yield None
        return
    if is_whole:
        describe_terms(loss, context)
        yield None
        return
    terms = _terms(loss, context, is_normalized=is_normalized)
    counts = _gathered(loss, terms, context, is_filler=is_filler)
    if context.is_tried:
        context.noted_counts.append(counts)
        if loss.grad_fn is not None:  # none of manual optimization's sum of losses
            context.noted_terms.append(None if terms is None else described(terms))
    with ExitStack() as stack:
        if context.by_counts and terms:
            for handle in _weigh(loss, terms, counts, is_filler=is_filler):
                stack.callback(handle.remove)
        yield counts


def describe_terms(loss: Tensor | None, context: SequenceContext) -> tuple[Any, ...]:
    """Note the terms of a loss of a trial's whole rows, what one device divides them by; return those of all losses of it so far."""
    if context.mesh.data_parallel_size > 1 and loss is not None and loss.grad_fn is not None:
        with _past_modes():
            terms = own_terms(loss, 1, context.mesh.sequence_group)
            own = None if terms is None else [each for each in terms if not each.is_of_all_groups]
            context.noted_terms.append(None if own is None else described(own))
    return tuple(context.noted_terms)


def counts_of_groups(loss: Tensor, context: SequenceContext) -> Tensor:
    """Return how many terms each group's loss has, -1 where that cannot be read, and what each counts by. Shapes: -> (groups, 1 + MOST_TERMS).

    Communicates: 264 bytes over the data-parallel groups.
    """
    return _gathered(loss, _terms(loss, context), context, is_filler=False)


def has_terms(counts: Tensor) -> bool:
    """Return whether some group's loss has terms of its own rows."""
    return bool((counts[:, 0] != 0).any())


def counts_differ(counts: Tensor) -> bool:
    """Return whether groups count by other numbers, in terms that all have."""
    return bool(((counts - counts[:1]).abs() > _ROUNDING * counts[:1].abs()).any())


def _terms(loss: Tensor, context: SequenceContext, *, is_normalized: bool = False) -> list[OwnTerm] | None:
    assert context.loss_step is not None
    rows, group = context.loss_step.batch.rows, context.mesh.sequence_group
    with _past_modes():
        return own_terms(loss, rows, group, is_normalized=is_normalized)


@contextmanager
def _past_modes() -> Iterator[None]:
    """Compute past modes of torch: manual optimization has its backward within a step, and a trial looks at what a step calls."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def _gathered(loss: Tensor, terms: list[OwnTerm] | None, context: SequenceContext, *, is_filler: bool) -> Tensor:
    own = torch.zeros(1 + MOST_TERMS, dtype=torch.float64, device=loss.device)
    own[0] = -1 if terms is None else len(terms)
    if terms and not is_filler:
        clamped = _are_clamped(loss, terms, context)
        with _past_modes():
            counted, added = torch.stack([each.count(loss) for each in terms]), added_to(terms, context.added, loss)
            own[1 : 1 + len(terms)] = torch.where(clamped & (added == 0), torch.zeros_like(counted), counted - added)
    if terms and context.added:  # each group's part of what one device adds once
        with _past_modes():
            added = added_to(terms, context.added, loss) / context.mesh.data_parallel_size
            own[1 : 1 + len(terms)] += added
    return torch.stack(comm.gather(own, context.mesh.data_group))


def _are_clamped(loss: Tensor, terms: list[OwnTerm], context: SequenceContext) -> Tensor:
    """Return of each term whether nothing counts in it, and it is divided by 1 so as not to be divided by 0. Shapes: -> (terms,), bool."""
    with _past_modes():
        empty = torch.stack([is_empty(each, loss) for each in terms])
        by_one = torch.stack([each.is_divided_by_one(loss) for each in terms])
        if len(terms) == 1:
            empty |= loss.detach() == 0
    if context.mesh.layout.size > 1:  # each rank sees its part of a mask
        empty = comm.largest((~empty).to(torch.int32), context.mesh.sequence_group) == 0
    return empty & by_one


def _weigh(loss: Tensor, terms: list[OwnTerm], counts: Tensor, *, is_filler: bool) -> Iterator[Any]:
    """Give each term's gradient its factor, by hooks of the graph; yield them. Nothing changes where groups have other terms."""
    groups, alike = len(counts), (counts[:, 0] == counts[0, 0]).all()
    begins: list[Tensor] = []  # the gradient of the loss, with what scales it

    def begin(gradients: tuple[Tensor | None, ...]) -> None:
        given = gradients[loss.output_nr]
        begins[:] = [] if given is None else [given]

    yield loss.grad_fn.register_prehook(begin)  # type: ignore[union-attr]
    factors: dict[tuple[Any, int], tuple[Tensor, Tensor]] = {}
    with _past_modes():
        for term, total in zip(terms, counts[:, 1:].sum(0), strict=False):
            own, count = term.factor(loss), term.count(loss)
            factor = torch.where(torch.isfinite(own), own * (groups * count / total), groups * term.numbers / total)
            if is_filler:
                factor = torch.zeros_like(own)
            factor = torch.where((total == 0) | (own == 0) | ~alike, own, factor)
            others = factors.get(term.node, (torch.zeros_like(own), torch.zeros_like(own)))
            factors[term.node] = others[0] + own, others[1] + factor
    for (node, index), (own, factor) in factors.items():
        yield node.register_prehook(_hook(begins, index, own, factor))


def _hook(begins: list[Tensor], index: int, own: Tensor, factor: Tensor) -> Callable[[Any], Any]:
    """Return what gives a term another coefficient than its own; what else reads the term keeps its part of the gradient."""

    def give(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        given = gradients[index]
        if given is None or not begins:
            return gradients
        [begin] = begins
        # Of a count of 0 the gradient is no number.
        added = torch.where(torch.isfinite(own), given + begin * (factor - own), begin * factor)
        return (*gradients[:index], added.to(given.dtype).view_as(given), *gradients[index + 1 :])

    return give
