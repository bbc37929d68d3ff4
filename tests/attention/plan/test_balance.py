"""Balanced layouts: which ranges they give to whom, on real documents and on drawn ones; no process, no kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.attention.balance import packed, standard_library
from lightning_sp.attention.plan.balance import balance, imbalance
from lightning_sp.attention.plan.blocks import Kind, Plan, key_ranges
from lightning_sp.attention.plan.swaps import LIMIT, MOVED_PAIRS, Split, _best_swaps, _Cost, is_balanceable
from lightning_sp.attention.plan.units import Pieces, Units
from lightning_sp.attention.reference import allowed
from lightning_sp.attention.spec.documents import boundaries_from_lengths
from lightning_sp.attention.spec.mask import AttentionMask
from lightning_sp.layout import SequenceLayout, positions
from tests.drawn_cases import masks


def documents(rows):
    return AttentionMask(boundaries=boundaries_from_lengths(rows))


def planned_pairs(mask, layout, length, rows):
    """Count the pairs that each ring rank's blocks compute."""
    plan = Plan(mask, layout, length, rows)
    pairs = [0] * layout.ring_size
    for rank in range(layout.ring_size):
        for source in range(layout.ring_size):
            for block in plan.blocks(rank, source):
                queries, keys = (end - start for start, end in (block.queries, block.keys))
                times = rows if block.row is None else 1
                pairs[rank] += times * (queries * keys if block.kind is Kind.FULL else queries * (queries + 1) // 2)
    return pairs


def planned_traffic(mask, layout, length, rows):
    """Return (tokens of keys that travel, blocks on other ranks' keys)."""
    plan, ring = Plan(mask, layout, length, rows), range(layout.ring_size)
    steps = [plan.blocks(q, k) for q in ring for k in ring if q != k]
    return sum(end - start for blocks in steps for start, end in key_ranges(blocks)), sum(map(len, steps))


def test_the_corpus_is_real():
    lengths = sorted(standard_library())
    assert len(lengths) > 400
    assert lengths[len(lengths) // 2] < lengths[-1] // 20, "few long files, many short ones"
    assert [sum(row) for row in packed(8192, 3, 0)] == [8192] * 3


@pytest.mark.parametrize("ring", [2, 4, 8])
@pytest.mark.parametrize("length", [8192, 32768, 131072])
@pytest.mark.parametrize("rows", [1, 4])
def test_real_documents_are_balanced_within_five_percent(ring, length, rows):
    worst = 0.0
    for seed in range(5):
        mask, degrees = documents(packed(length, rows, seed)), SequenceLayout(ring)
        found = balance([mask], degrees, length)
        pairs = planned_pairs(mask, found.layout, length, rows)
        assert max(pairs) * ring <= 1.05 * sum(pairs)
        assert found.imbalance == pytest.approx(max(pairs) * ring / sum(pairs) - 1, abs=1e-12)
        before = planned_pairs(mask, degrees, length, rows)
        assert found.zigzag_imbalance == pytest.approx(max(before) * ring / sum(before) - 1, abs=1e-12)
        worst = max(worst, found.zigzag_imbalance)
    assert worst > 0.05, "documents that zigzag balances prove nothing"


@pytest.mark.parametrize(
    "options", [dict(causal=False), dict(window_size=(4095, None)), dict(chunk_size=8192)], ids=str
)
@pytest.mark.parametrize("ring", [4, 8])
def test_masks_of_other_kinds_are_balanced_for_what_they_are(options, ring):
    worst = 0.0
    for seed in range(5):
        boundaries, degrees = boundaries_from_lengths(packed(32768, 1, seed)), SequenceLayout(ring)
        mask = AttentionMask(boundaries=boundaries, **options)
        found = balance([mask], degrees, 32768)
        assert found.imbalance == imbalance([mask], found.layout, 32768) <= 0.05
        causal = balance([AttentionMask(boundaries=boundaries)], degrees, 32768)
        worst = max(worst, imbalance([mask], causal.layout, 32768))
    assert worst > 0.1, "a causal mask's layout is no answer for this one"


def test_layers_count_together_by_how_many_they_are():
    boundaries, degrees = boundaries_from_lengths(packed(32768, 1, 0)), SequenceLayout(4)
    full, window = AttentionMask(boundaries=boundaries), AttentionMask(boundaries=boundaries, window_size=(511, None))
    both = [window, full, window, window]
    found = balance(both, degrees, 32768)
    assert found.imbalance == imbalance(both, found.layout, 32768) <= LIMIT / 1000
    pairs = [planned_pairs(mask, degrees, 32768, 1) for mask in both]
    total = [sum(rank) for rank in zip(*pairs, strict=True)]
    assert found.zigzag_imbalance == pytest.approx(max(total) * 4 / sum(total) - 1, abs=1e-12)
    assert balance([full, full], degrees, 32768).layout == balance([full], degrees, 32768).layout


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_the_keys_moved_and_the_calls_are_those_of_the_plan(ring):
    for seed in range(3):
        mask, degrees = documents(packed(8192, 1, seed)), SequenceLayout(ring)
        found = balance([mask], degrees, 8192)
        units = Units.cut(Pieces.of([mask], 8192), ring, 4)
        for layout, moved in ((degrees, found.zigzag_moved_tokens), (found.layout, found.moved_tokens)):
            tokens, calls = planned_traffic(mask, layout, 8192, 1)
            held = [positions(layout, 8192, rank) for rank in range(ring)]
            owner = np.array([next(r for r in range(ring) if start in held[r]) for start in units.edges[:-1].tolist()])
            assert (moved, Split(units, owner).num_calls) == (tokens, calls)


@pytest.mark.parametrize("ring", [1, 2, 4, 8])
def test_zigzag_stays_where_it_is_balanced(ring):
    length, degrees = 4096, SequenceLayout(ring)
    for mask in (
        AttentionMask(),
        AttentionMask(False),
        documents([[length]]),
        documents([[length // (2 * ring)] * (2 * ring)]),
        documents([[length // 64] * 64]),
    ):
        found = balance([mask], degrees, length)
        assert found.layout == degrees
        assert found.imbalance == found.zigzag_imbalance <= LIMIT / 1000
        assert found.moved_tokens == found.zigzag_moved_tokens
        assert not found.pays


def test_a_long_document_among_short_ones_is_shared():
    length, ring = 8192, 4
    mask = documents([[4096, *[64] * 64]])
    found = balance([mask], SequenceLayout(ring), length)
    assert found.zigzag_imbalance > 0.5
    assert found.imbalance <= LIMIT / 1000
    assert found.pays


def test_tiny_sequences_are_not_worth_their_kernel_calls():
    found = balance([documents([[40, 10, 10, 4]])], SequenceLayout(4), 64)
    assert found.imbalance < found.zigzag_imbalance / 2
    assert not found.pays
    mask = documents([[2500, 300, 300, 996]])
    assert balance([mask], SequenceLayout(4), 4096).pays
    assert not balance([mask], SequenceLayout(4), 4096, device="cuda").pays, (
        "a launch there costs as much as many more pairs"
    )


@settings(deadline=None)
@given(ring=st.integers(1, 6), ulysses=st.integers(1, 3), length=st.integers(1, 300), data=st.data())
def test_drawn_masks_get_a_layout_no_worse_than_zigzag(ring, ulysses, length, data):
    degrees = SequenceLayout(ring, ulysses)
    padded = degrees.padded_length(length)
    mask = masks.build(data.draw(masks.drawn(length)), length, padded)
    found = balance([mask], degrees, padded)
    owned = [positions(found.layout, padded, rank) for rank in range(degrees.size)]
    assert {len(each) for each in owned} == {padded // degrees.size}
    assert torch.equal(torch.cat(owned).sort().values, torch.arange(padded))
    seen = allowed(mask, padded)
    for layout, told in ((found.layout, found.imbalance), (degrees, found.zigzag_imbalance)):
        chunks = [layout.ring_chunks(padded, rank) for rank in range(ring)]
        pairs = [sum(int(seen[:, 0, start:end].sum()) for start, end in held) for held in chunks]
        expected = max(pairs) * ring / sum(pairs) - 1 if sum(pairs) else 0.0
        assert told == pytest.approx(expected, abs=1e-12)
        assert imbalance([mask], layout, padded) == pytest.approx(expected, abs=1e-12)
    assert found.imbalance <= max(found.zigzag_imbalance, LIMIT / 1000)
    assert balance([mask], degrees, padded) == found


@pytest.mark.parametrize("ring", [32, 64, 128])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_large_rings_are_balanced_for_hundreds_of_documents(ring, device):
    rows = packed(2**20, 1, 0, shorter=8)
    assert len(rows[0]) > 400
    found = balance([documents(rows)], SequenceLayout(ring), 2**20, device=device)
    assert found.imbalance <= LIMIT / 1000 < found.zigzag_imbalance
    assert found.pays


def dealt(ring, units, seed):
    """Return units of real documents, dealt at random."""
    cut = Units.cut(Pieces.of([documents(packed(8192, 2, seed))], 8192), ring, units)
    return Split(cut, np.random.default_rng(seed).permutation(np.repeat(np.arange(ring), 2 * units)))


@pytest.mark.parametrize("seed", range(3))
def test_what_a_swap_costs_is_the_difference_of_what_the_ranks_cost(seed):
    """Of each unit alone: given away, and taken on."""
    split = dealt(4, 4, seed)
    cost, members = _Cost.of(split, 4_000), split.members

    def whole(units):
        before = np.append(-1, units[:-1])
        return int(cost._behind(before, units).sum())

    keys = int(_Cost.of(split, 0)._behind(np.insert(members[:, :-1], 0, -1, axis=1), members).sum())
    assert keys == MOVED_PAIRS * (split.moved_tokens + int(split.units.own_keys.sum()))
    removed, inserted = cost.of_removal(members), cost.of_insertion(members, members[::-1])
    for rank, own in enumerate(members):
        for i, unit in enumerate(own):
            assert removed[rank, i] == whole(np.delete(own, i)) - whole(own)
            other = members[::-1][rank, i]
            assert inserted[rank, i] == whole(np.sort(np.append(own, other))) - whole(own)
            assert unit not in np.delete(own, i)


def test_a_round_swaps_each_rank_once_and_helps_those_that_swap():
    split = dealt(8, 2, 0)
    busy, idle = np.split(np.argsort(-split.loads, kind="stable"), [int((split.loads > split.limit).sum())])
    one, other = _best_swaps(split, np.repeat(busy, len(idle)), np.tile(idle, len(busy)), 4_000)
    givers, takers = split.owner[one].tolist(), split.owner[other].tolist()
    assert len(one) >= 1
    assert len({*givers, *takers}) == 2 * len(one)
    after = split.swapped(one, other).loads
    assert all(max(after[a], after[b]) < split.loads[a] for a, b in zip(givers, takers, strict=True))


def test_units_too_large_for_the_limit_are_not_dealt():
    """The late queries of a long document compute more in one unit than a rank may in all."""
    pieces = Pieces.of([documents([[4096, *[64] * 64]])], 8192)
    balanceable = [is_balanceable(Units.cut(pieces, 16, units), 16) for units in (1, 2, 4, 8)]
    assert balanceable == sorted(balanceable)
    assert balanceable[0] is False
    assert balanceable[-1] is True


def test_units_know_their_own_keys_and_the_documents_that_go_on():
    everything = Units.cut(Pieces.of([AttentionMask(causal=False)], 16), 2, 1)
    assert everything.own_keys.tolist() == [4] * 4
    assert everything.first.tolist() == [0] * 4
    # A window begins to move within the second unit: it is still one document that goes on there.
    window = Units.cut(Pieces.of([AttentionMask(causal=True, window_size=(5, 0))], 16), 2, 1)
    assert window.crossing.tolist() == [0, 1, 1, 1]
    two = Units.cut(Pieces.of([documents([[8, 8]])], 16), 2, 1)
    assert two.crossing.tolist() == [0, 1, 0, 1]
    assert two.own_keys.tolist() == [4] * 4
