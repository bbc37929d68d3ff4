"""Balanced layouts: which ranges they give to whom, on real documents and on drawn ones; no process, no kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.balance import packed, standard_library
from lightning_sp.attention.plan.balance import LIMIT, _Split, _table, _Units, balance, imbalance
from lightning_sp.attention.plan.blocks import Kind, Plan, key_ranges
from lightning_sp.attention.reference import allowed
from lightning_sp.attention.spec.documents import boundaries_from_lengths
from lightning_sp.attention.spec.mask import AttentionMask
from lightning_sp.layout import SequenceLayout, positions
from tests import masks


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
        units = _Units.cut(_table([mask], 8192), 8192, ring, 4)
        for layout, moved in ((degrees, found.zigzag_moved_tokens), (found.layout, found.moved_tokens)):
            tokens, calls = planned_traffic(mask, layout, 8192, 1)
            held = [positions(layout, 8192, rank) for rank in range(ring)]
            owner = np.array([next(r for r in range(ring) if start in held[r]) for start in units.edges[:-1].tolist()])
            assert (moved, _Split(units, owner).num_calls) == (tokens, calls)


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
