"""Which blocks a ring step computes and which heads an exchange moves: index math alone, no process, no kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sp.attention.plan.blocks import WINDOW_TILE, Kind, Plan, key_ranges, plan_of, renumbered, tile_on
from lightning_sp.attention.plan.intervals import BlockSparsity
from lightning_sp.attention.reference import allowed
from lightning_sp.attention.schemes.head_split import HeadSplit
from lightning_sp.attention.spec.documents import boundaries_from_lengths
from lightning_sp.attention.spec.mask import AttentionMask
from lightning_sp.layout import SequenceLayout
from tests.drawn_cases import layouts, masks


def visits(plan, rows, opens=True):
    """Count how often the blocks of all (query rank, key rank) visit each global pair. Shapes: -> (rows, S, T).

    `opens`: each block that is the first of its queries says so; else none says so that is not.
    """
    layout, length = plan.layout, plan.length
    count = torch.zeros(rows, length, plan.key_length, dtype=torch.int64)
    tokens, key_tokens = (
        [torch.cat([torch.arange(a, b) for a, b in held.ring_chunks(n, r)]) for r in range(layout.ring_size)]
        for held, n in ((layout, length), (layout.for_length(plan.key_length), plan.key_length))
    )
    for query_rank in range(layout.ring_size):
        for key_rank in range(layout.ring_size):
            opened = torch.zeros(rows, len(tokens[0]), dtype=torch.bool)
            for block in plan.blocks(query_rank, key_rank):
                queries, keys = tokens[query_rank][slice(*block.queries)], key_tokens[key_rank][slice(*block.keys)]
                assert min(len(queries), len(keys)) > 0
                seen = torch.ones(len(queries), len(keys), dtype=torch.int64)
                if block.kind is not Kind.FULL:
                    assert len(queries) == len(keys), "kernels align non-square causal blocks differently"
                    seen = seen.tril() if block.kind is Kind.CAUSAL else seen.triu()
                chosen = slice(None) if block.row is None else slice(block.row, block.row + 1)
                first = ~opened[chosen, slice(*block.queries)]
                if opens:
                    assert first.all() == first.any() == block.opens, "a block opens its queries, or none of them"
                assert first.all() or not block.opens
                opened[chosen, slice(*block.queries)] = True
                for row in range(rows)[chosen]:
                    count[row, queries[:, None], keys] += seen
    return count


@given(ring=st.integers(1, 8), ulysses=st.integers(1, 3), length=st.integers(1, 80), data=st.data())
def test_blocks_cover_exactly_the_allowed_pairs_once(ring, ulysses, length, data):
    layout = SequenceLayout(ring, ulysses)
    padded = layout.padded_length(length)
    mask = masks.build(data.draw(masks.drawn(length)), length, padded)
    count = visits(Plan(mask, layout, padded, 2), rows=2)
    assert torch.equal(count, allowed(mask, padded)[:, 0].expand(2, -1, -1).long())


@given(ring=st.integers(1, 5), ulysses=st.integers(1, 2), length=st.integers(1, 80), data=st.data())
def test_blocks_of_any_layout_cover_exactly_the_allowed_pairs_once(ring, ulysses, length, data):
    padded = SequenceLayout(ring, ulysses).padded_length(length)
    layout = data.draw(layouts.drawn(ring, ulysses, padded))
    mask = masks.build(data.draw(masks.drawn(length)), length, padded)
    count = visits(Plan(mask, layout, padded, 2), rows=2)
    assert torch.equal(count, allowed(mask, padded)[:, 0].expand(2, -1, -1).long())


@given(ring=st.integers(1, 5), length=st.integers(1, 80), keys=st.integers(1, 80), data=st.data())
def test_blocks_that_are_hidden_are_not_visited(ring, length, keys, data):
    layout = SequenceLayout(ring)
    crosses = data.draw(st.booleans())
    padded, padded_keys = (layout.padded_length(n) for n in (length, keys if crosses else length))
    mask = AttentionMask(False) if crosses else masks.build(data.draw(masks.drawn(length)), length, padded)
    sizes, side = (data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))), 90
    seen = torch.rand(side, side, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))) < 0.5
    plan = Plan(
        mask, layout, padded, 2, padded_keys, BlockSparsity(sizes, side, seen.to(torch.uint8).numpy().tobytes())
    )
    whole = seen.repeat_interleave(sizes[0], 0).repeat_interleave(sizes[1], 1)[:padded, :padded_keys]
    expected = allowed(mask, padded, padded_keys)[:, 0].expand(2, -1, -1) & whole
    assert torch.equal(visits(plan, rows=2, opens=False), expected.long())


def test_a_map_that_hides_nothing_of_a_mask_leaves_its_plan():
    layout, side = SequenceLayout(4), 8
    for mask, table in (
        (AttentionMask(), torch.ones(side, side).tril()),
        (AttentionMask(window_size=(9, None)), torch.ones(side, side)),
        (AttentionMask(boundaries=boundaries_from_lengths([[8, 24, 32]])), torch.ones(side, side)),
    ):
        held = BlockSparsity((8, 8), side, table.to(torch.uint8).numpy().tobytes())
        cut, plain = Plan(mask, layout, 64, 1, sparsity=held), Plan(mask, layout, 64, 1)
        assert all(cut.blocks(q, k) == plain.blocks(q, k) for q in range(4) for k in range(4))


@pytest.mark.slow
@given(window=st.integers(1, 3 * WINDOW_TILE), ring=st.integers(1, 4), device=st.sampled_from(["cpu", "cuda"]))
def test_windows_larger_than_a_tile(window, ring, device):
    layout = SequenceLayout(ring)
    length = layout.padded_length(6 * WINDOW_TILE)
    mask = AttentionMask(window_size=(window - 1, None))
    plan = Plan(mask, layout, length, 1, tile=tile_on(device))
    assert torch.equal(visits(plan, 1), allowed(mask, length)[:, 0].long())


def test_a_window_on_cuda_lays_its_keys_side_by_side_no_more_than_twice():
    length, window = 32768, 4096
    keys = {}
    for device in ("cpu", "cuda"):
        plan = plan_of(AttentionMask(window_size=(window - 1, None)), SequenceLayout(), length, 1, tile=tile_on(device))
        keys[device] = sum(block.keys[1] - block.keys[0] for block in plan.blocks(0, 0))
    assert keys["cuda"] < 2 * length < 17 * length < keys["cpu"]


@pytest.mark.parametrize("ring", range(1, 9))
@pytest.mark.parametrize("causal", [True, False])
def test_one_document_takes_one_block_a_step_and_is_balanced(ring, causal):
    layout = SequenceLayout(ring)
    length = 3 * layout.multiple
    plan = Plan(AttentionMask(causal), layout, length, 1)
    pairs = []
    for query_rank in range(ring):
        steps = [plan.blocks(query_rank, key_rank) for key_rank in range(ring)]
        assert [len(blocks) for blocks in steps] == [1] * ring
        pairs.append(sum(_pairs(blocks[0]) for blocks in steps))
    assert set(pairs) == {(length * (length + 1) // 2 if causal else length * length) // ring}


def _pairs(block):
    queries, keys = (end - start for start, end in (block.queries, block.keys))
    return queries * keys if block.kind is Kind.FULL else queries * (queries + 1) // 2


def test_only_keys_that_some_query_may_see_travel():
    layout, length = SequenceLayout(4), 32  # chunks of 4; local tokens are two chunks
    causal = Plan(AttentionMask(), layout, length, 1)
    assert key_ranges(causal.blocks(2, 1)) == [(0, 4)], "the late chunk of an earlier rank is after every query"
    later = causal.blocks(1, 2)
    assert (key_ranges(later), later[0].queries) == ([(0, 8)], (4, 8)), "only the late queries see a later rank's keys"
    assert key_ranges(Plan(AttentionMask(False), layout, length, 1).blocks(2, 1)) == [(0, 8)]
    apart = Plan(AttentionMask(boundaries=boundaries_from_lengths([[4] * 8])), layout, length, 1)
    assert not any(apart.blocks(q, k) for q in range(4) for k in range(4) if q != k), (
        "one a chunk: nobody needs anybody"
    )
    reaching = Plan(AttentionMask(boundaries=boundaries_from_lengths([[6, 26]])), layout, length, 1)
    assert key_ranges(reaching.blocks(1, 0)) == [(0, 4)], "tokens 4, 5 of rank 1 see document 0"


def test_a_window_moves_its_tokens_and_not_the_sequence():
    layout, length, window = SequenceLayout(4), 4096, 64
    plan = Plan(AttentionMask(window_size=(window - 1, None)), layout, length, 1)
    moved = [
        sum(end - start for start, end in key_ranges(plan.blocks(query_rank, key_rank)))
        for query_rank in range(4)
        for key_rank in range(4)
        if query_rank != key_rank
    ]
    # Eight chunks have seven seams; that between the ring's last rank's two chunks is its own.
    assert sum(moved) == 6 * (window - 1)


def test_ranges_that_lie_apart_travel_one_after_the_other():
    plan = Plan(AttentionMask(False, window_size=(1, 1)), SequenceLayout(2), 16, 1)
    blocks = plan.blocks(1, 0)  # rank 1 holds 4..12, its neighbours 3 and 12 are tokens 3 and 4 of rank 0
    assert key_ranges(blocks) == [(3, 5)]
    wide = Plan(AttentionMask(bidirectional=torch.tensor([[[4, 13]]]), window_size=(0, None)), SequenceLayout(2), 16, 1)
    assert key_ranges(wide.blocks(1, 0)) == [(4, 5)]
    chunked = Plan(
        AttentionMask(False, chunk_size=3), SequenceLayout(4), 48, 1
    )  # chunks of 6 are whole: nothing travels
    assert not any(chunked.blocks(q, k) for q in range(4) for k in range(4) if q != k)
    two = Plan(AttentionMask(False, window_size=(2, 2)), SequenceLayout(2), 32, 1)
    ranges = key_ranges(two.blocks(0, 1))  # rank 0 holds 0..8 and 24..32, and sees 8, 9 and 22, 23 of rank 1
    assert ranges == [(0, 2), (14, 16)]
    assert {block.keys for block in renumbered(two.blocks(0, 1), ranges)} <= {(a, b) for a in range(4) for b in range(a + 1, 5)}  # fmt: skip


def test_a_row_that_all_share_needs_no_block_of_its_own():
    def rows(lengths):
        mask = AttentionMask(boundaries=boundaries_from_lengths(lengths))
        return {block.row for block in Plan(mask, SequenceLayout(2), 8, 2).blocks(0, 0)}

    assert rows([[3, 5], [3, 5]]) == {None}
    assert rows([[3, 5], [8]]) == {0, 1}


def test_masks_of_the_same_contents_share_their_plan():
    layout = SequenceLayout(2)
    first, again = (AttentionMask(boundaries=boundaries_from_lengths([[3, 5]]), window_size=(2, None)) for _ in "ab")
    assert plan_of(first, layout, 8, 1) is plan_of(again, layout, 8, 1)
    assert plan_of(first, layout, 8, 1) is not plan_of(AttentionMask(boundaries=first.boundaries), layout, 8, 1)


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


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_stages_have_each_head_once_and_the_keys_that_they_need(heads, kv_heads):
    for size in (size for size in range(1, heads + 1) if heads % size == 0):
        for num_stages in (n for n in range(1, heads // size + 1) if heads // size % n == 0):
            split = HeadSplit(heads, kv_heads, size, num_stages)
            for rank in range(size):
                stages = [*split.each_stage()]
                assert [h for s in stages for h in range(*s.queries(rank))] == list(range(*split.queries(rank)))
                assert len({s.queries(rank)[1] - s.queries(rank)[0] for s in stages}) == 1
                travelled = [kv for s in stages for kv in range(*s.travelling(rank))]
                assert travelled == list(range(*split.keys(rank))), "each once"
                assert sum(s.width(rank) for s in stages) == split.width(rank)
                for stage in stages:
                    _check_groups(stage, rank, heads // kv_heads)
                passes = [*split.passes()]
                assert [s for p in passes for s in p.each_stage()] == stages
                assert [kv for p in passes for kv in range(*p.keys(rank))] == travelled, "of one pass alone"
                for one_pass in passes:
                    first, *others = one_pass.each_stage()
                    assert first.travelling(rank) == one_pass.keys(rank)
                    assert all(kv[0] == kv[1] for kv in (stage.travelling(rank) for stage in others))
            # What several ranks use comes home in one exchange, where it is summed.
            for stage in split.each_stage():
                for kv in {kv for rank in range(size) for kv in range(*stage.travelling(rank))}:
                    users = [rank for rank in range(size) if kv in range(*split.keys(rank))]
                    assert all(kv in range(*stage.travelling(rank)) for rank in users)


def test_stages_that_share_no_key_value_head_are_passes_of_their_own():
    passes = {
        (heads, kv_heads, size, stages): [p.stages for p in HeadSplit(heads, kv_heads, size, stages).passes()]
        for heads, kv_heads, size, stages in [(8, 8, 2, 4), (8, 2, 2, 4), (8, 4, 2, 4), (8, 4, 2, 2), (12, 6, 2, 2)]
    }
    assert list(passes.values()) == [
        [(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 4)], [(0, 2), (2, 4)], [(0, 1), (1, 2)], [(0, 2)],
    ]  # fmt: skip


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
