"""What "auto" chooses over nodes, and why: bytes that cross, counted pair by pair. No process but for the last tests."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_sp.attention.schemes.ulysses import HeadSplit
from lightning_sp.config import StrategyConfig, needless_exchange, resolve_split
from lightning_sp.nodes import Placement, common_ranks_per_node, ranks_per_node, ring_blocks, ulysses_blocks
from lightning_sp.trainer.processes.process_strategy import ProcessStrategy
from tests.nodes_ranks import split_and_said

# What "auto" chooses where all ranks share a sequence, ulysses x ring; a star where an all-to-all crosses nodes.
CHOSEN = """
nodes x ranks   8 heads, 8 kv   16, 16    32, 32    64, 64     16, 8    32, 8    64, 8
  1 x 8         8x1             8x1       8x1       8x1        8x1      8x1      8x1
  2 x 8         8x2             16x1*     16x1*     16x1*      8x2      8x2      8x2
  4 x 8         8x4             16x2*     32x1*     32x1*      8x4      8x4      8x4
  8 x 4         8x4*            16x2*     32x1*     32x1*      8x4*     8x4*     8x4*
128 x 8         8x128           16x64*    32x32*    64x16*     8x128    8x128    8x128
"""
HEADS = [(8, 8), (16, 16), (32, 32), (64, 64), (16, 8), (32, 8), (64, 8)]
ROWS = [line.split() for line in CHOSEN.strip().splitlines()[1:]]
CELLS = [
    (int(row[0]), int(row[2]), heads, chosen) for row in ROWS for heads, chosen in zip(HEADS, row[3:], strict=True)
]


def placed(nodes, per_node, heads, kv_heads, sequence=None):
    world = nodes * per_node
    return Placement(
        world_size=world,
        sequence_parallel_size=sequence or world,
        ranks_per_node=per_node,
        num_heads=heads,
        num_kv_heads=kv_heads,
    )


@pytest.mark.parametrize(("nodes", "per_node", "heads", "chosen"), CELLS)
def test_auto_chooses_what_the_table_says(nodes, per_node, heads, chosen):
    placement = placed(nodes, per_node, *heads)
    ulysses, ring = resolve_split(StrategyConfig(), nodes * per_node, heads[0], placement)
    assert f"{ulysses}x{ring}{'*' if placement.exchanges_across_nodes(ulysses) else ''}" == chosen


def test_the_docs_have_the_same_table():
    lines = (Path(__file__).parents[1] / "docs" / "guide.md").read_text().splitlines()
    rows = [line.replace("|", " ").split() for line in lines if re.match(r"\| \d+ x \d+ \|", line)]
    assert rows == ROWS


def test_one_node_is_split_as_without_nodes():
    for ranks, heads in itertools.product((1, 2, 4, 6, 8, 12), (1, 2, 3, 4, 6, 8, 12, 32)):
        kv_heads = next(k for k in (4, 3, 2, 1) if heads % k == 0)
        placement = placed(1, ranks, heads, kv_heads)
        assert resolve_split(StrategyConfig(), ranks, heads, placement) == resolve_split(StrategyConfig(), ranks, heads)


def test_grouped_heads_go_round_a_ring_and_others_are_exchanged():
    """8:1 over 2 nodes of 8: the numbers of the docstring."""
    grouped, alike = placed(2, 8, 32, 4), placed(2, 8, 32, 32)
    assert [grouped.bytes_across_nodes(size) for size in (8, 16)] == [96, 192]
    assert [alike.bytes_across_nodes(size) for size in (8, 16)] == [384, 256]
    assert resolve_split(StrategyConfig(), 16, 32, grouped) == (8, 2)
    assert resolve_split(StrategyConfig(), 16, 32, alike) == (16, 1)


def counted_bytes(placement, ulysses):
    """Add up what each rank sends to each other rank on another node, as the schemes send it, for a token and an element."""
    size, node = placement.sequence_parallel_size, placement.ranks_per_node
    split = HeadSplit(placement.num_heads, placement.num_kv_heads, ulysses)
    keys = [last - first for first, last in map(split.keys, range(ulysses))]
    queries = [last - first for first, last in map(split.queries, range(ulysses))]
    total = 0.0
    for a, b in itertools.permutations(range(placement.world_size), 2):
        if a // size != b // size or a // node == b // node:
            continue
        (ring_a, u_a), (ring_b, u_b) = divmod(a % size, ulysses), divmod(b % size, ulysses)
        if ring_a == ring_b:
            forward = queries[u_b] + 2 * keys[u_b] + queries[u_a]
            backward = queries[u_b] + queries[u_a] + 2 * keys[u_a]
            total += 2 * (forward + backward)
        if u_a == u_b:
            # Both of a ring rank's zigzag chunks to the earlier ones, the early chunk alone to the later.
            there, home = (2, 1) if ring_b < ring_a else (1, 2)
            total += ulysses * keys[u_a] * (2 * there + 2 * there + 4 * home)
    return total / placement.world_size


@pytest.mark.parametrize("sequence", [4, 6, 12, 24])  # Ulysses of all sizes for which a mean is exact
@pytest.mark.parametrize("per_node", [2, 3, 4, 8, 24])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (6, 3), (24, 4)])
def test_the_formula_is_what_the_schemes_send(sequence, per_node, heads):
    placement = placed(24 // per_node, per_node, *heads, sequence=sequence)
    for ulysses in (d for d in range(1, sequence + 1) if sequence % d == 0 and d <= heads[0]):
        counted, aligned = counted_bytes(placement, ulysses), per_node % ulysses == 0 or ulysses % per_node == 0
        if aligned and heads[0] % ulysses == 0:
            assert placement.bytes_across_nodes(ulysses) == pytest.approx(counted, rel=1e-12)


def test_the_ranks_of_a_level_are_neighbours():
    assert ulysses_blocks(8, 2) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert ring_blocks(8, 4, 2) == ((0, 2), (1, 3), (4, 6), (5, 7))
    for world, sequence, ulysses in itertools.product((8, 24, 1024), (4, 8), (1, 2, 4)):
        for blocks in (ulysses_blocks(world, ulysses), ring_blocks(world, sequence, ulysses)):
            assert sorted(rank for block in blocks for rank in block) == list(range(world))
            # Whatever the number of data-parallel groups, a sequence that fits a node stays in it.
            assert all(len({rank // 8 for rank in block}) == 1 for block in blocks)


@pytest.mark.parametrize("sequence", [2, 4, 8])
def test_data_parallel_groups_cross_nodes_and_sequences_do_not(sequence):
    placement = placed(4, 8, 32, 32, sequence=sequence)
    assert resolve_split(StrategyConfig(), sequence, 32, placement) == (sequence, 1)
    assert placement.bytes_across_nodes(sequence) == 0


def test_nodes_of_other_sizes_have_the_neighbours_in_common():
    assert common_ranks_per_node(16, [8] * 16) == 8
    assert common_ranks_per_node(12, [8] * 8 + [4] * 4) == 4
    assert common_ranks_per_node(6, [8] * 6) == 2  # a launcher that says what cannot be


def test_the_launcher_says_how_many_ranks_a_node_has():
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "4"}
    assert ranks_per_node(16, num_nodes=2, environment={}) == 8
    assert ranks_per_node(16, num_nodes=2, environment=torchrun) == 4
    assert ranks_per_node(16, num_nodes=2, environment={"LOCAL_WORLD_SIZE": "4"}) == 8, "of another launcher's job"
    assert ranks_per_node(1, num_nodes=2, environment={}) == 1


def test_the_strategy_knows_the_trainers_nodes(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    strategy = ProcessStrategy(process_group_backend=None, timeouts=(None, None), hang_s=60.0)
    strategy._parallel_devices = [torch.device("cpu")] * 8
    strategy.cluster_environment = SimpleNamespace(world_size=lambda: 16)
    strategy.num_nodes = 2
    assert strategy.ranks_per_node == 8


@pytest.mark.parametrize("given", [{"ulysses_size": 16}, {"ring_size": 1}, {"ulysses_size": 16, "ring_size": 1}])
def test_an_exchange_across_nodes_that_need_not_be_is_said_and_stays(given):
    config, placement = StrategyConfig(**given), placed(2, 8, 32, 4)
    assert resolve_split(config, 16, 32, placement) == (16, 1)
    names = ", ".join(f"{name}={size}" for name, size in given.items())
    assert needless_exchange(config, 16, placement) == (
        f"{names} exchanges heads across nodes of 8 ranks: 192 bytes between nodes for each token and element of a head; ulysses_size=8, "
        "ring_size=2, as 'auto' chooses, sends 96"
    )


@pytest.mark.parametrize(
    ("given", "ulysses", "placement"),
    [
        ({}, 8, placed(2, 8, 32, 4)),
        ({"ulysses_size": 8}, 8, placed(2, 8, 32, 4)),
        ({"ulysses_size": 4}, 4, placed(2, 8, 32, 4)),
        ({"ulysses_size": 16}, 16, placed(2, 8, 32, 32)),  # the fewest bytes
        ({"ulysses_size": 16}, 16, placed(1, 16, 32, 4)),
    ],
)
def test_nothing_is_said_of_other_degrees(given, ulysses, placement):
    assert needless_exchange(StrategyConfig(**given), ulysses, placement) is None


def test_real_ranks_split_by_the_nodes_that_they_are_told(pools):
    for per_node, given, expected in (
        (None, {}, (4, 1)),
        (4, {}, (4, 1)),
        (2, {}, (2, 2)),
        (2, {"ulysses_size": 4}, (4, 1)),
    ):
        found = pools(4).run(split_and_said, per_node, given)
        assert [each[0] for each in found] == [expected] * 4
        said = "sequence_parallel: ulysses_size=4 exchanges heads across nodes of 2 ranks: 32 bytes between nodes for each token and element"
        assert [said in each[1] for each in found] == [bool(given) and rank == 0 for rank in range(4)]


def test_ranks_that_are_told_otherwise_choose_alike(pools):
    assert [each[0] for each in pools(4).run(split_and_said, [4, 4, 2, 2], {})] == [(2, 2)] * 4
