"""Ulysses in stages of heads: the law, the same bytes, the next exchange behind this kernel, and smaller buffers."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.instruments.traffic import ring_sent_units, ulysses_sent_elements
from lightning_sp.attention.schemes.head_split import HeadSplit
from lightning_sp.layout import SequenceLayout
from lightning_sp.testing import RankPool
from tests.attention.ranks.operator_ranks import after_a_failing_stage, exchanges_in_flight, settled_peak_bytes, traffic
from tests.attention.ranks.test_law import DEGREES, LEARNED, METHODS, SCORES, TRANSPORTS, hold_the_law, stretched
from tests.drawn_cases import masks
from tests.drawn_cases.covering import covering
from tests.slow import slow

LENGTH, DIM = 64, 8
# Query and key-value heads. In stages of one head: of 8/2 a key-value head serves several stages; of 12/6 in halves
# stages begin amid a key-value head's queries; of 12/3 over four ranks so do the ranks.
HEADS = [(8, 8), (8, 2), (8, 1), (6, 2), (12, 6), (12, 3)]
CHANGES = [{}, *SCORES, *LEARNED]


def stages_of(heads, ulysses):
    """Return each number of stages above 1 that divides a rank's heads."""
    own, rest = divmod(heads, ulysses)
    return [] if rest else [n for n in range(2, own + 1) if own % n == 0]


def product(world, length):
    """Return every case: degrees, heads, stages, and in turn every mask, change of the scores, transport and method."""
    rows = []
    for (ulysses, ring), (heads, kv_heads) in itertools.product(DEGREES[world], HEADS):
        ways = itertools.product(TRANSPORTS, METHODS) if ring > 1 else [("network", "hops")]
        named = [*((name, {}) for name in masks.NAMED), *((name, dict(keys=21)) for name in masks.CROSS)]
        named += [(name, more) for more in CHANGES for name in ("causal", "packed", "dense over a window")]
        for stages, (transport, method), (name, more) in itertools.product(
            stages_of(heads, ulysses) if ulysses > 1 else [], ways, named
        ):
            case = dict(ulysses=ulysses, ring=ring, heads=heads, kv_heads=kv_heads, length=length, stages=stages)
            case |= dict(mask=stretched(name, length), transport=transport, method=method, **more)
            axes = dict(heads=(heads, kv_heads, stages, ulysses, ring), mask=name, scores=str(more))
            rows.append((axes | dict(ways=(transport, method)), case))
    return rows


@pytest.mark.parametrize(
    ("world", "length"),
    [(2, 32), pytest.param(4, 32, marks=pytest.mark.slow), pytest.param(4, 37, marks=pytest.mark.slow)],
)
def test_law_in_stages(pools, world, length):
    """Every number of stages at every degree, every mask, change of the scores, transport and method; see the next for pairs of these."""
    rows = product(world, length)
    hold_the_law(pools, world, [rows[i][1] for i in covering([axes for axes, _ in rows], num_axes=1)])


@pytest.mark.slow
@pytest.mark.parametrize(("world", "length"), [(2, 37), (4, 32), (4, 37)])
def test_law_in_stages_of_pairs(pools, world, length):
    rows = product(world, length)
    cases = [rows[i][1] for i in covering([axes for axes, _ in rows])]
    for start in range(0, len(cases), 400):  # a pool's time limit is for a call
        hold_the_law(pools, world, cases[start : start + 400])


WAYS = {"hops": ("network", "hops"), "saved": ("network+saved", "hops"), "all_gather": ("network", "all_gather")}
DEGREES_OF_STAGES = {"2x1": (2, 1), "2x2": (2, 2), "4x1": (4, 1)}
# Without a ring all ways are one.
FEW = [("hops", "2x1"), ("hops", "4x1"), ("saved", "2x2")]


@pytest.mark.parametrize(
    ("way", "degrees"),
    [*FEW, *slow(*(each for each in itertools.product(WAYS, DEGREES_OF_STAGES) if each not in FEW))],
)
def test_stages_send_the_same_bytes(pools, way, degrees):
    """The formulas of the docstrings know no stages: a key-value head travels once for all its query heads, round the ring too."""
    (transport, method), (ulysses, ring) = WAYS[way], DEGREES_OF_STAGES[degrees]
    layout = SequenceLayout(ring, ulysses)
    for heads, kv_heads in [(8, 8), (8, 2), (6, 2), (8, 1), (12, 6), (12, 3)]:
        split = HeadSplit(heads, kv_heads, ulysses)
        for stages in stages_of(heads, ulysses):
            ranks = pools(layout.size).run(
                traffic, ulysses, ring, heads, kv_heads, LENGTH, DIM, torch.float32, True, None, transport, method, stages
            )  # fmt: skip
            for rank, measured in enumerate(ranks):
                ring_rank, ulysses_rank = layout.coordinates(rank)
                exchanged = ulysses_sent_elements(split, ulysses_rank, batch=1, tokens=LENGTH // layout.size, dim=DIM)
                units = ring_sent_units(ring, ring_rank, causal=True, saves_kv=transport == "network+saved")
                unit = (split.keys(ulysses_rank)[1] - split.keys(ulysses_rank)[0]) * (LENGTH // ring) * DIM
                expected = [(e + n * unit) * 4 for e, n in zip(exchanged, units, strict=True)]
                case = f"{heads}/{kv_heads} in {stages} stages, rank {rank}"
                assert [sent for sent, _ in measured] == expected, case
                assert [calls["all_to_all_single"] for _, calls in measured] == [2 * stages, 2 * stages + 1], case


@pytest.mark.parametrize("degrees", [(2, 1), (2, 2)], ids=["2x1", "2x2"])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_every_next_stage_is_under_way_while_this_one_is_computed(pools, degrees, kv_heads):
    stages, layout = 4, SequenceLayout(degrees[1], degrees[0])
    for found in pools(layout.size).run(exchanges_in_flight, *degrees, 8, kv_heads, LENGTH, stages):
        hidden = [num_calls for num_calls, _ in found]
        forward, (of_delta, *backward), home = (
            hidden[: 2 * stages],
            hidden[2 * stages : 3 * stages + 1],
            hidden[3 * stages + 1 :],
        )
        assert of_delta == 0
        # The first to come and the last to go have nothing to hide behind.
        assert sorted(forward)[:2] == [0, 0] == [forward[0], forward[-1]]
        assert min(forward[1:-1]) >= 1
        assert backward[0] == 0
        assert min(backward[1:]) >= 1
        assert home == [0] * stages


@pytest.mark.parametrize("degrees", [(2, 1), (2, 2)], ids=["2x1", "2x2"])
@pytest.mark.parametrize("step", ["forward_step", "backward_step"])
def test_after_an_error_in_a_stage_the_next_exchange_is_no_leftover(pools, degrees, step):
    for failures, error in pools(degrees[0] * degrees[1]).run(after_a_failing_stage, *degrees, step):
        assert failures == 2
        assert error < 1e-12


@pytest.mark.parametrize("stages", [2, 4])
def test_a_stage_sends_its_share_at_a_time(pools, stages):
    whole, staged = (pools(2).run(exchanges_in_flight, 2, 1, 8, 8, LENGTH, n)[0] for n in (1, stages))
    of_delta = LENGTH * 4  # of all stages, in one exchange
    assert {size for _, size in whole} == {3 * LENGTH * 4 * 8, LENGTH * 4 * 8, of_delta}
    assert {size for _, size in staged} == {3 * LENGTH * 4 * 8 // stages, LENGTH * 4 * 8 // stages, of_delta}


@pytest.mark.slow
def test_the_peak_in_stages_is_below_the_unstaged():
    # In tensors of this rank's tokens and all heads. Forward: what is sent and what comes (6), against what is saved, out (5) and a stage's
    # buffers. With its backward: 9, see `test_peak_of_ulysses_is_that_of_the_kernels_backward`, of which the gradient of out is a stage's now.
    heads, length, dim = 16, 1024, 512
    unit = length // 4 * heads * dim * 4
    peaks = {}
    for stages, backward in itertools.product((1, 2), (False, True)):
        with RankPool(
            4, timeout_s=120
        ) as pool:  # ranks of its own: what earlier calls have left in a rank's heap would count
            every = pool.run(settled_peak_bytes, 4, 1, heads, length, dim, stages, backward)
        peaks[stages, backward] = max(every) / unit
    assert peaks[2, False] < peaks[1, False] - 0.2, peaks
    assert peaks[2, True] < peaks[1, True] - 0.2, peaks
