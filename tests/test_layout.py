"""The layout's index math, for all ranks of all degrees up to 16, with no process."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout, merge, pad, positions, shard
from tests.drawn_cases import layouts

LAYOUTS = [SequenceLayout(ring, ulysses) for ring in range(1, 17) for ulysses in range(1, 16 // ring + 1)]
NAMES = [f"ring{x.ring_size}-ulysses{x.ulysses_size}" for x in LAYOUTS]


@pytest.fixture(params=LAYOUTS, ids=NAMES)
def layout(request):
    return request.param


def test_ranks_own_every_position_once_and_equally_many(layout):
    for length in (layout.multiple, 2 * layout.multiple, 5 * layout.multiple):
        owned = [positions(layout, length, rank) for rank in range(layout.size)]
        assert {len(each) for each in owned} == {length // layout.size}
        assert torch.equal(torch.cat(owned).sort().values, torch.arange(length))


def test_ranges_are_the_positions_rising_and_joined_where_they_touch(layout):
    length = 3 * layout.multiple
    for rank in range(layout.size):
        ranges = layout.ranges(length, rank)
        assert all(start < end for start, end in ranges)
        assert 1 <= len(ranges) <= 2
        expected = [p for start, end in ranges for p in range(start, end)]
        assert positions(layout, length, rank).tolist() == expected == sorted(expected)


def test_ulysses_ranks_hold_contiguous_pieces_of_their_ring_ranks_chunks(layout):
    length = 2 * layout.multiple
    for ring_rank in range(layout.ring_size):
        chunks = torch.cat([torch.arange(start, end) for start, end in layout.ring_chunks(length, ring_rank)])
        ranks = [ring_rank * layout.ulysses_size + u for u in range(layout.ulysses_size)]
        assert [layout.coordinates(rank) for rank in ranks] == [(ring_rank, u) for u in range(layout.ulysses_size)]
        assert torch.equal(torch.cat([positions(layout, length, rank) for rank in ranks]), chunks)


def test_ring_ranks_have_equally_many_causal_pairs(layout):
    length = 2 * layout.multiple
    per_rank = [
        sum(position + 1 for start, end in layout.ring_chunks(length, r) for position in range(start, end))
        for r in range(layout.ring_size)
    ]
    assert set(per_rank) == {length * (length + 1) // 2 // layout.ring_size}


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_merge_inverts_shard(layout, dim):
    shape = [2, 3, 2]
    shape[dim] = 2 * layout.multiple
    whole = torch.randn(shape)
    parts = [shard(whole, layout, rank, dim=dim) for rank in range(layout.size)]
    assert all(part.is_contiguous() for part in parts)
    assert torch.equal(merge(parts, layout, dim=dim), whole)
    for rank, part in enumerate(parts):
        assert torch.equal(part, whole.index_select(dim, positions(layout, shape[dim], rank)))


def test_multiple_is_the_least_that_divides_chunks_and_shards(layout):
    def fits(length):
        chunks = 2 * layout.ring_size if layout.ring_size > 1 else 1
        return length % chunks == 0 and length % layout.size == 0

    assert layout.multiple == next(length for length in range(1, 1000) if fits(length))
    if layout.ring_size > 1:
        assert layout.multiple == math.lcm(2 * layout.ring_size, layout.size)


def test_padded_length_is_the_next_multiple(layout):
    for length in range(3 * layout.multiple + 2):
        padded = layout.padded_length(length)
        assert padded % layout.multiple == 0
        assert length <= padded < length + layout.multiple


def test_a_length_that_the_degrees_do_not_divide_is_an_error_of_ours():
    with pytest.raises(AssertionError, match="length 13 is no multiple of 8"):
        positions(SequenceLayout(4, 2), 13, 0)


def test_one_rank_holds_everything():
    whole = torch.randn(2, 7)
    assert torch.equal(shard(whole, SequenceLayout(), 0, dim=1), whole)
    assert torch.equal(merge([whole], SequenceLayout(), dim=1), whole)


def test_pad_appends_the_value_and_is_the_tensor_itself_where_nothing_is_missing():
    labels = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert pad(labels, 5, dim=1, value=-100).tolist() == [[1, 2, 3, -100, -100], [4, 5, 6, -100, -100]]
    assert pad(labels, 3, dim=1, value=-100) is labels
    assert pad(torch.ones(1, 2), 3, dim=0, value=0.5).tolist() == [[1, 1], [0.5, 0.5], [0.5, 0.5]]


@settings(deadline=None)
@given(ring=st.integers(1, 5), ulysses=st.integers(1, 3), data=st.data())
def test_an_assignment_gives_each_rank_its_ranges_and_merge_puts_them_back(ring, ulysses, data):
    length = SequenceLayout(ring, ulysses).multiple * data.draw(st.integers(1, 6))
    layout = data.draw(layouts.drawn(ring, ulysses, length))
    whole = torch.arange(2 * length).view(2, length)
    parts = [shard(whole, layout, rank, dim=1) for rank in range(layout.size)]
    assert {part.shape for part in parts} == {(2, length // layout.size)}
    assert torch.equal(merge(parts, layout, dim=1), whole)
    for ring_rank, held in enumerate(layout.assignment):
        tokens = [token for start, end in held for token in range(start, end)]
        ranks = range(ring_rank * ulysses, (ring_rank + 1) * ulysses)
        assert torch.cat([parts[rank][0] for rank in ranks]).tolist() == tokens
    again = SequenceLayout.from_table(ring, ulysses, layout.table)
    assert (again, hash(again)) == (layout, hash(layout))
    assert SequenceLayout.from_table(ring, ulysses, None) == SequenceLayout(ring, ulysses)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ((((0, 4),), ((4, 8),), ((8, 12),)), "of [4, 4, 4] tokens to 3 ring ranks, for ring 2 x ulysses 2: must be equally many for each of 2"),
        ((((0, 3),), ((3, 8),)), "of [3, 5] tokens to 2 ring ranks, for ring 2 x ulysses 2: must be equally many for each of 2"),
        ((((0, 3),), ((3, 6),)), "must be equally many for each of 2, and in all a multiple of 4"),
        ((((2, 4), (0, 2)), ((4, 8),)), "the ranges of a ring rank must rise"),
        ((((0, 4),), ((3, 7),)), "a range ends at 4 and the next begins at 3; every token must be in one range"),
        ((((0, 4),), ((5, 9),)), "a range ends at 4 and the next begins at 5"),
        ((((1, 5),), ((5, 9),)), "a range ends at 0 and the next begins at 1"),
        ((((0, 2), (2, 2), (2, 4)), ((4, 8),)), "a range is empty"),
    ],
)  # fmt: skip
def test_an_assignment_that_is_no_partition_is_refused(assignment, message):
    with pytest.raises(SequenceParallelError) as caught:
        SequenceLayout(2, 2, assignment)
    assert message in str(caught.value)


def test_an_assignment_is_for_one_length():
    layout = SequenceLayout(2, 1, (((0, 1), (3, 6)), ((1, 3), (6, 8))))
    with pytest.raises(SequenceParallelError, match="a sequence of 12 tokens in a layout made for a batch of 8 "):
        shard(torch.zeros(1, 12), layout, 0, dim=1)


def test_an_assignment_is_of_one_length_and_others_are_zigzags():
    layout = SequenceLayout(2, 1, (((0, 2), (6, 8)), ((2, 6),)))
    assert layout.for_length(8) is layout
    assert layout.for_length(16) == SequenceLayout(2, 1)
    assert SequenceLayout(2, 1).for_length(16) == SequenceLayout(2, 1)
