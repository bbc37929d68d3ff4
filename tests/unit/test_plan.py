"""Which blocks a ring step computes and which heads an exchange moves: index math alone, no process, no kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sp.attention.mask import AttentionMask, boundaries_from_lengths, document_ids
from lightning_sp.attention.plan import key_range, plan_step
from lightning_sp.attention.ring import documents_of
from lightning_sp.attention.ulysses import HeadSplit
from lightning_sp.layout import SequenceLayout


def visits(layout, length, documents, causal, rows):
    """Count how often the blocks of all (query rank, key rank) visit each global pair. Shapes: -> (rows, S, S)."""
    count = torch.zeros(rows, length, length, dtype=torch.int64)
    tokens = [
        torch.cat([torch.arange(a, b) for a, b in layout.ring_chunks(length, r)]) for r in range(layout.ring_size)
    ]
    for query_rank in range(layout.ring_size):
        for key_rank in range(layout.ring_size):
            for block in plan_step(layout, length, documents, causal, query_rank, key_rank):
                queries, keys = tokens[query_rank][slice(*block.queries)], tokens[key_rank][slice(*block.keys)]
                seen = torch.ones(len(queries), len(keys), dtype=torch.int64)
                if block.causal:
                    assert len(queries) == len(keys), "kernels align non-square causal blocks differently"
                    seen = seen.tril()
                chosen = range(rows) if block.row is None else [block.row]
                for row in chosen:
                    count[row, queries[:, None], keys] += seen
    return count


def allowed(mask, length, rows):
    """Return the pairs that the mask's definition allows."""
    pairs = torch.ones(rows, length, length, dtype=torch.bool)
    if mask.causal:
        pairs = pairs.tril()
    if mask.boundaries is not None:
        ids = document_ids(mask.boundaries, length)
        pairs = pairs & (ids[:, :, None] == ids[:, None, :])
    return pairs


@given(
    ring=st.integers(1, 8),
    ulysses=st.integers(1, 3),
    first=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    second=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    causal=st.booleans(),
)
def test_blocks_cover_exactly_the_allowed_pairs_once(ring, ulysses, first, second, causal):
    layout = SequenceLayout(ring, ulysses)
    length = layout.padded_length(max(sum(first), sum(second)))
    lengths = [[*row, length - sum(row)] if sum(row) < length else row for row in (first, second)]
    mask = AttentionMask(causal, boundaries_from_lengths(lengths))
    count = visits(layout, length, documents_of(mask.boundaries), causal, rows=2)
    assert torch.equal(count, allowed(mask, length, 2).long())


@pytest.mark.parametrize("ring", range(1, 9))
@pytest.mark.parametrize("causal", [True, False])
def test_one_document_takes_one_block_a_step_and_is_balanced(ring, causal):
    layout = SequenceLayout(ring)
    length = 3 * layout.multiple
    assert torch.equal(visits(layout, length, None, causal, 1), allowed(AttentionMask(causal), length, 1).long())
    pairs = []
    for query_rank in range(ring):
        steps = [plan_step(layout, length, None, causal, query_rank, key_rank) for key_rank in range(ring)]
        assert [len(blocks) for blocks in steps] == [1] * ring
        pairs.append(sum(_pairs(blocks[0]) for blocks in steps))
    assert set(pairs) == {(length * (length + 1) // 2 if causal else length * length) // ring}


def _pairs(block):
    queries, keys = (end - start for start, end in (block.queries, block.keys))
    return queries * (queries + 1) // 2 if block.causal else queries * keys


def test_only_keys_that_some_query_may_see_travel():
    layout, length = SequenceLayout(4), 32  # chunks of 4; local tokens are two chunks
    earlier = plan_step(layout, length, None, True, 2, 1)
    assert key_range(earlier) == (0, 4), "the late chunk of an earlier rank is after every query"
    later = plan_step(layout, length, None, True, 1, 2)
    assert (key_range(later), later[0].queries) == ((0, 8), (4, 8)), "only the late queries see a later rank's keys"
    assert key_range(plan_step(layout, length, None, False, 2, 1)) == (0, 8)
    documents = [[0, 4, 8, 12, 16, 20, 24, 28, 32]]  # one a chunk: nobody needs anybody
    steps = [plan_step(layout, length, documents, True, q, k) for q in range(4) for k in range(4) if q != k]
    assert {key_range(blocks) for blocks in steps} == {(0, 0)}
    reaching = plan_step(layout, length, [[0, 6, 32]], True, 1, 0)  # tokens 4, 5 of rank 1 see document 0
    assert key_range(reaching) == (0, 4)


def test_a_row_that_all_share_needs_no_block_of_its_own():
    layout = SequenceLayout(2)
    same = documents_of(boundaries_from_lengths([[3, 5], [3, 5]]))
    assert same == [[0, 3, 8]]
    assert {block.row for block in plan_step(layout, 8, same, True, 0, 0)} == {None}
    different = documents_of(boundaries_from_lengths([[3, 5], [8]]))
    assert different == [[0, 3, 8], [0, 8]]
    assert {block.row for block in plan_step(layout, 8, different, True, 0, 0)} == {0, 1}


HEADS = [(h, k) for h in range(1, 13) for k in range(1, h + 1) if h % k == 0]


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_heads_are_split_evenly_and_grouped_completely(heads, kv_heads):
    shared = heads // kv_heads
    for size in range(1, heads + 1):
        split = HeadSplit(heads, kv_heads, size)
        owned = [range(*split.queries(rank)) for rank in range(size)]
        assert [head for each in owned for head in each] == list(range(heads))
        assert max(map(len, owned)) - min(map(len, owned)) <= 1
        for rank in range(size):
            needed = sorted({head // shared for head in owned[rank]})
            assert list(range(*split.keys(rank))) == needed, "exactly the key-value heads that its queries need"
            assert split.width(rank) == len(owned[rank]) + 2 * len(needed)
            _check_groups(split, rank, shared)


def _check_groups(split, rank, shared):
    first, first_kv = split.queries(rank)[0], split.keys(rank)[0]
    covered = []
    for group in split.head_groups(rank):
        queries, keys = range(*group.queries), range(*group.keys)
        assert len(queries) % len(keys) == 0
        per_key = len(queries) // len(keys)
        for i, head in enumerate(queries):
            # What a GQA kernel does with this group is what the whole attention does with that head.
            assert keys[i // per_key] + first_kv == (head + first) // shared
        covered += queries
    assert covered == list(range(len(range(*split.queries(rank)))))


def test_uneven_split_of_six_heads_over_four_ranks():
    split = HeadSplit(6, 2, 4)
    assert [split.queries(rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert [split.keys(rank) for rank in range(4)] == [(0, 1), (0, 2), (1, 2), (1, 2)]
    assert [split.width(rank) for rank in range(4)] == [4, 6, 3, 3]


def test_even_gqa_is_one_kernel_call():
    for heads, kv_heads, size in [(8, 8, 4), (8, 2, 4), (8, 1, 4), (8, 4, 2), (6, 2, 2), (12, 4, 4)]:
        split = HeadSplit(heads, kv_heads, size)
        assert [len(split.head_groups(rank)) for rank in range(size)] == [1] * size
