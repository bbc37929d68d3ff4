"""Calls that give one outcome for all tokens show others: for the same tokens whole and in each part."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_sp.layout import SequenceLayout, positions
from lightning_sp.preflight.recording.token_outcomes import TokenOutcomes, Tokens, Truths

ROWS, LENGTH, LAYOUT = 4, 16, SequenceLayout(ring_size=2)
IDS = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 40
VALUES = IDS.double().sin()
TABLE = torch.zeros(50).index_fill_(0, torch.tensor([45]), 1.0)

CALLS = {
    "equal": lambda ids, values: ids == 40,
    "above": lambda ids, values: ids > 39,
    "below": lambda ids, values: torch.lt(ids, 0),
    "number": lambda ids, values: values.abs() >= 5.0,
    "missing": lambda ids, values: torch.isnan(values),
    "several": lambda ids, values: torch.isin(ids, torch.arange(60, 90)),
    "flat": lambda ids, values: ids.flatten() == 40,
    "quotient": lambda ids, values: ids // 40,
    "looked up": lambda ids, values: TABLE[ids],
    "embedded": lambda ids, values: F.embedding(ids, TABLE[:, None]),
    "chosen": lambda ids, values: torch.stack([values + 3, values], -1).argmax(-1),
}


def tokens(rank: int | None) -> Tokens:
    at = torch.arange(LENGTH) if rank is None else positions(LAYOUT, LENGTH, rank)
    return Tokens(rows=ROWS, first_row=0, length=LENGTH, piece=LENGTH // LAYOUT.multiple, positions=at)


def of(rank: int | None) -> tuple[Tensor, Tensor]:
    at = tokens(rank).positions
    return IDS[:, at], VALUES[:, at]


@pytest.mark.parametrize("kind", CALLS)
def test_other_outcomes_are_of_the_same_tokens_whole_and_in_parts(kind):
    call = CALLS[kind]
    with TokenOutcomes(tokens(None), {}) as noted:
        before = call(*of(None))
    assert len(noted.found) == 1
    with TokenOutcomes(tokens(None), noted.found):
        whole = call(*of(None))
    others = (whole != before).view(ROWS, LENGTH)
    assert others.any()
    assert not others.all()
    for rank in range(2):
        with TokenOutcomes(tokens(rank), {}, follows=True) as followed:
            call(*of(rank))
        assert set(noted.found) <= set(followed.found)
        with TokenOutcomes(tokens(rank), noted.found):
            part = call(*of(rank))
        wanted = whole.view(ROWS, LENGTH, *whole.shape[2:] if kind == "embedded" else ())[:, tokens(rank).positions]
        assert torch.equal(part.view_as(wanted), wanted), rank


def test_what_a_part_counts_itself_is_other_in_the_part():
    """A place in an expert is below its capacity for every token: shifted, whole and part differ where the part began at 0."""
    chosen = F.one_hot(IDS % 2, 2)

    def dropped(rank: int | None) -> Tensor:
        places = (chosen[:, tokens(rank).positions].cumsum(1) * chosen[:, tokens(rank).positions]).sum(-1)
        return places >= 12

    with TokenOutcomes(tokens(None), {}) as noted:
        assert not dropped(None).any()
    with TokenOutcomes(tokens(None), noted.found):
        whole = dropped(None)
    with TokenOutcomes(tokens(1), noted.found):
        part = dropped(1)
    assert not torch.equal(part, whole[:, tokens(1).positions])


SEVERAL = {
    "argmax": lambda x: x.argmax(-1),
    "max": lambda x: x.max(-1).indices,
    "topk": lambda x: x.topk(1).indices[..., 0],
    "truth": lambda x: x[..., 0] > 0,
    "truth of a row": lambda x: (x[..., 0] > 0).view(ROWS, -1),
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_one_of_several_outcomes_is_left_to_a_token_of_each_row(kind):
    choose = SEVERAL[kind]
    logits = torch.randn(ROWS, LENGTH, 3, generator=torch.Generator().manual_seed(0))
    with TokenOutcomes(tokens(None), {}) as noted:
        before = choose(logits)
    with TokenOutcomes(tokens(None), noted.found):
        whole = choose(logits)
    [other] = noted.found.values()
    rare, common = (True, False) if isinstance(other, Truths) else other
    assert ((whole == rare).sum(1) == 1).all()
    assert (whole == common).any()
    others = (before != rare) & (whole != rare)
    assert torch.equal(whole[others], before[others])
    for rank in range(2):
        with TokenOutcomes(tokens(rank), noted.found):
            part = choose(logits[:, tokens(rank).positions])
        assert torch.equal(part, whole[:, tokens(rank).positions])
        assert (part == rare).any() == (rank == 0)


def test_a_truth_is_known_by_its_tokens_wherever_it_is_asked():
    """A part that leaves a loop earlier has another one's call under the same number."""
    values = VALUES - VALUES.mean()

    def asked(rank: int | None, skips: bool) -> Tensor:
        at = tokens(rank).positions
        for other in (5.0, 0.0):
            if skips and other:
                continue
            found = values[:, at] > other
        return found

    with TokenOutcomes(tokens(None), {}) as noted:
        asked(None, skips=True)
    with TokenOutcomes(tokens(None), noted.found):
        whole = asked(None, skips=False)
    with TokenOutcomes(tokens(1), noted.found):
        part = asked(1, skips=True)
    assert (whole.sum(1) == 1).all()
    assert torch.equal(part, whole[:, tokens(1).positions])


def test_outcomes_that_are_learned_or_of_no_tokens_are_left():
    table = nn.Parameter(TABLE)
    with TokenOutcomes(tokens(None), {}) as noted:
        _ = (table[IDS], IDS.amax(1) > 90, TABLE == 5, (IDS[:, :, None] - IDS[:, None]) > 90)
    assert not noted.found
