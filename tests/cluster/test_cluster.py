"""Several nodes: the golden losses, the bytes that cross, a node that is lost, a wrong interface. `make cluster` runs all of it.

Nodes are network namespaces of one machine (`nodes.py`): what is shown is the code and its bytes, not a network's speed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_sp.layout import SequenceLayout
from tests.cluster.crossing import CONTROL_BYTES, crossing_elements, crossing_messages
from tests.cluster.nodes import ROOT, START_S, Cluster, Node, srun, torchrun, wait, why_no_nodes
from tests.golden.ranks import NUM_STEPS, golden

HEADS, DIM, LENGTHS, FLOAT64 = 8, 16, [256, 512], 8
LAUNCHERS = {"torchrun": torchrun, "srun": srun}


@pytest.fixture(scope="module", autouse=True)
def _nodes_can_be_made() -> None:
    if why := why_no_nodes():
        pytest.skip(f"no nodes on this machine: {why}")


def run(
    cluster: Cluster, calls: list[Any], folder: Path, *, ranks_per_node: int = 1, launcher: str = "torchrun"
) -> list[list[Any]]:
    """Run functions of `ranks.py` on all ranks; return for each rank what each of them answered."""
    script = ["tests.cluster.ranks", str(folder), json.dumps(calls)]
    started = LAUNCHERS[launcher](cluster, script, ranks_per_node=ranks_per_node, log=folder / "log")
    codes = wait(started, timeout_s=START_S)
    assert not any(codes), "\n".join(said(folder).values())
    return [json.loads((folder / f"{r}.json").read_text()) for r in range(len(cluster.nodes) * ranks_per_node)]


def said(folder: Path) -> dict[str, str]:
    """Return the end of what each node's processes said."""
    return {path.suffix[1:]: path.read_text()[-8000:] for path in sorted(folder.glob("log.*"))}


def assert_golden(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert [int(step) for step in result["losses"]] == list(range(NUM_STEPS))
        assert max(abs(a - b) for a, b in zip(result["losses"].values(), golden(), strict=True)) <= 1e-8


def attention(degrees: tuple[int, int], kv_heads: int, causal: bool = True) -> dict[str, Any]:
    """Degrees: Ulysses, ring."""
    names = {"ulysses": degrees[0], "ring": degrees[1], "heads": HEADS, "kv_heads": kv_heads, "dim": DIM}
    return {**names, "causal": causal}


def crossing_bytes(node: int, ranks_per_node: int, length: int, ulysses: int, ring: int, **shape: Any) -> int:
    layout = SequenceLayout(ring, ulysses)
    return FLOAT64 * crossing_elements(layout, ranks_per_node, node, length=length, **shape)


def assert_crossed(result: dict[str, Any], node: int, ranks_per_node: int, shape: dict[str, Any]) -> None:
    """The difference of two lengths: all else does not depend on the length, but for what gloo may leave out (`crossing.py`)."""
    short, long = (crossing_bytes(node, ranks_per_node, length, **shape) for length in LENGTHS)
    layout = SequenceLayout(shape["ring"], shape["ulysses"])
    # Two around the pass, and two around the readings.
    most = CONTROL_BYTES * crossing_messages(layout, ranks_per_node, num_barriers=4)
    more = result["payloads"][1] - result["payloads"][0] - (long - short)
    assert long - short > 4 * most, "else the test would tell nothing"
    assert abs(more) <= most, (node, shape, more)
    assert more % CONTROL_BYTES == 0, (node, shape, more)


@pytest.mark.slow
def test_two_nodes_give_the_golden_losses_and_the_formulas_bytes_cross(tmp_path: Path) -> None:
    shapes = [attention((1, 2), 1), attention((2, 1), 1)]
    calls = [["golden", {"layout": [1, 2, 1], "num_nodes": 2}]]
    calls += [["crossed", {"lengths": LENGTHS, **shape}] for shape in shapes]
    with Cluster(2, rate_mbit=1000) as cluster:
        ranks = run(cluster, calls, tmp_path)
    assert_golden([rank[0] for rank in ranks])
    for node, (_, *crossed) in enumerate(ranks):
        assert crossed[0]["no_shared_memory"] == "the ranks are on 2 machines, node0, node1"
        for result, shape in zip(crossed, shapes, strict=True):
            assert_crossed(result, node, 1, shape)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [8, 2, 1], ids=["MHA", "GQA 4:1", "GQA 8:1"])
def test_bytes_that_cross_between_two_nodes_of_two_ranks(tmp_path: Path, kv_heads: int) -> None:
    shapes = [attention(degrees, kv_heads, causal) for degrees in ((2, 2), (4, 1), (1, 4)) for causal in (True, False)]
    inside = attention((1, 2), kv_heads)
    calls = [["crossed", {"lengths": LENGTHS, **shape}] for shape in (*shapes, inside)]
    # Ring 2 x Ulysses 2: one layer of Llama, 4 heads of which 2 are of keys, 8 elements each, 2 rows, 2 steps.
    degrees = {"ring_size": 2, "ulysses_size": 2}
    calls += [["crossed_in_training", {"lengths": LENGTHS, "strategy": degrees}]]
    with Cluster(2, rate_mbit=1000) as cluster:
        ranks = run(cluster, calls, tmp_path, ranks_per_node=2)
    for rank, (*crossed, of_pairs, training) in enumerate(ranks):
        for result, shape in zip(crossed, shapes, strict=True):
            assert_crossed(result, rank // 2, 2, shape)
        assert of_pairs["no_shared_memory"] == "", "a ring within a node reads its keys in place"
        assert abs(of_pairs["payloads"][1] - of_pairs["payloads"][0]) <= 4 * 2 * 2 * CONTROL_BYTES, "barriers alone"
        llama = {"ulysses": 2, "ring": 2, "heads": 4, "kv_heads": 2, "dim": 8, "causal": True}
        short, long = (2 * 2 * crossing_bytes(rank // 2, 2, length, **llama) for length in LENGTHS)
        # A message has a frame at least, so there are no more messages than frames.
        more = training["payloads"][1] - training["payloads"][0] - (long - short)
        assert abs(more) <= CONTROL_BYTES * training["frames"], more
        assert more % CONTROL_BYTES == 0
        print(f"node {rank // 2}: training {training}, formula {long - short}, more {more}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "num_nodes", "ranks_per_node", "layout"),
    [("srun", 2, 2, [1, 2, 2]), ("srun", 4, 1, [2, 1, 2]), ("torchrun", 4, 1, [1, 4, 1])],
)
def test_more_nodes_and_slurm_give_the_golden_losses(
    tmp_path: Path, launcher: str, num_nodes: int, ranks_per_node: int, layout: list[int]
) -> None:
    with Cluster(num_nodes, rate_mbit=1000) as cluster:
        calls = [["golden", {"layout": layout, "num_nodes": num_nodes}]]
        ranks = run(cluster, calls, tmp_path, ranks_per_node=ranks_per_node, launcher=launcher)
    assert len(ranks) == 4
    assert_golden([rank[0] for rank in ranks])


@pytest.mark.slow
def test_over_a_slow_link_transfers_take_as_long_as_their_bytes(tmp_path: Path) -> None:
    """GQA 8:1, H 8, D 64, float32, 1,024 tokens. What a pass takes beyond one over a link that is no limit is its exposed transfer.

    The bytes are those of both ways: gloo's sender posts first, so that two ranks often send one after the other (docs/log/cluster.md).
    """
    length, rates = 1024, [100_000, 4]
    degrees = {"ring": (1, 2), "ulysses": (2, 1), "causal ring": (1, 2)}
    shapes = {name: {**attention(each, 1, causal="causal" in name), "dim": 64} for name, each in degrees.items()}
    shared = {"rates_mbit": rates, "repeats": 3, "length": length, "dtype": "float32"}
    with Cluster(2, rate_mbit=rates[0]) as cluster:
        answers = run(cluster, [["timed", {**shared, **shape}] for shape in shapes.values()], tmp_path)[0]
    fast, slow = (
        {name: answer["seconds"][i] for name, answer in zip(shapes, answers, strict=True)} for i in range(len(rates))
    )
    exposed = {name: slow[name] - fast[name] for name in shapes}
    sent = {name: sum(crossing_bytes(node, 1, length, **shape) for node in (0, 1)) for name, shape in shapes.items()}
    print(f"fast {fast}, slow {slow}, exposed {exposed}, bytes {sent}")
    for name in shapes:
        assert fast[name] <= 0.2 * slow[name], (name, fast, slow)
    for name in ("ring", "causal ring"):
        of_times, of_bytes = exposed[name] / exposed["ulysses"], sent[name] / sent["ulysses"]
        assert abs(of_times / of_bytes - 1) <= 0.2, (name, of_times, of_bytes)
    # Here stands what "auto" chooses, once it knows the nodes.


LOST = [
    ("srun", "kill", 1, {}),
    ("torchrun", "kill", 0, {}),
    ("srun", "cut", 0, {}),
    ("srun", "cut", 1, {"in_preflight": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "how", "lost", "options"), LOST)
def test_a_node_that_is_lost_ends_the_others_within_the_timeout(
    tmp_path: Path, launcher: str, how: str, lost: int, options: dict[str, Any]
) -> None:
    limit_s = 10
    told, strategy = tmp_path / "told", {"ring_size": 2, "ulysses_size": 2, "timeout_s": limit_s}
    calls = [["endless", {"num_nodes": 2, "devices": 2, "strategy": strategy, "said": str(told), **options}]]
    with Cluster(2, rate_mbit=1000) as cluster:
        started = start(cluster, launcher, calls, tmp_path, ranks_per_node=2)
        until(told.exists, started, tmp_path)
        lost_at = time.time()
        lose(cluster, how, cluster.nodes[lost])
        codes = wait(others(started, lost), timeout_s=START_S)
    assert all(codes), said(tmp_path)
    words = said(tmp_path)[f"node{1 - lost}"]
    assert "SequenceParallelError: rank " in words, words
    assert f"on host node{1 - lost} has lost another rank" in words
    assert f"after timeout_s={limit_s} s at the latest" in words
    # In the preflight the step itself takes 2 s more, and a rank that failed waits up to 5 s for the others' word (`comm/failure.py`).
    more_s = 2 + 5 if "in_preflight" in options else 0
    assert max(failed_after(tmp_path, lost_at, f"node{1 - lost}")) <= limit_s + 5 + more_s, words


def others(started: list[Any], lost: int) -> list[Any]:
    """Return the processes of the node that is not lost."""
    half = len(started) // 2
    return started[:half] if lost else started[half:]


def failed_after(folder: Path, lost_at: float, node: str) -> list[float]:
    """Return how many seconds after a loss each rank of a node had its error."""
    found = [float(path.read_text()) - lost_at for path in folder.glob(f"failed.*.{node}")]
    print(f"errors on {node} after {found} s")
    assert found
    return found


@pytest.mark.slow
def test_a_ring_whose_link_goes_down_ends_within_the_timeout(tmp_path: Path) -> None:
    limit_s = 10
    told = tmp_path / "told"
    shape = {**attention((1, 2), 8), "length": 512, "dtype": "float64"}
    calls = [["endless_attention", {"said": str(told), "timeout_s": limit_s, **shape}]]
    # So slow that a pass is nearly all transfer.
    with Cluster(2, rate_mbit=20) as cluster:
        started = start(cluster, "torchrun", calls, tmp_path)
        until(told.exists, started, tmp_path)
        lost_at = time.time()
        lose(cluster, "cut", cluster.nodes[1])
        assert all(wait(started, timeout_s=START_S))
    for node in ("node0", "node1"):
        assert max(failed_after(tmp_path, lost_at, node)) <= limit_s + 5, said(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("interface", "words"),
    [
        ("lo", "the ranks met, and cannot reach one another over gloo: GLOO_SOCKET_IFNAME='lo' on host node0;"),
        ("eth9", "GLOO_SOCKET_IFNAME='eth9' on host node0: there is no such network interface"),
    ],
)
def test_a_wrong_interface_is_named(tmp_path: Path, interface: str, words: str) -> None:
    strategy = {"ring_size": 2, "timeout_s": 10}
    calls = [["endless", {"num_nodes": 2, "devices": 1, "strategy": strategy, "said": str(tmp_path / "told")}]]
    with Cluster(2, rate_mbit=1000) as cluster:
        started = start(cluster, "srun", calls, tmp_path, environment={"GLOO_SOCKET_IFNAME": interface})
        codes = wait(started, timeout_s=START_S)
    assert all(codes)
    # One reaches for the other, and tells it.
    assert any(words.replace("node0", node) in found for node, found in said(tmp_path).items()), said(tmp_path)
    for found in said(tmp_path).values():
        assert "SequenceParallelError: " in found
        assert "this host has lo, eth0: set GLOO_SOCKET_IFNAME to the one by which the nodes reach each other" in found


def test_nothing_is_left_of_nodes_whose_program_is_killed() -> None:
    code = "import time; from tests.cluster.nodes import Cluster; cluster = Cluster(2, rate_mbit=1).__enter__()\n"
    code += "print(*[node.first for node in cluster.nodes], flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        first = [int(each) for each in started.stdout.readline().split()]
        started.kill()
    assert len(first) == 2
    limit = time.monotonic() + 20
    while any(is_alive(each) for each in first):
        assert time.monotonic() < limit
        time.sleep(0.05)


def is_alive(process: int) -> bool:
    """A process that nobody has asked for its exit code has ended, and has no namespaces any more."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # before the file was opened, or since
        return False


def start(
    cluster: Cluster, launcher: str, calls: list[Any], folder: Path, ranks_per_node: int = 1, **options: Any
) -> Any:
    script = ["tests.cluster.ranks", str(folder), json.dumps(calls)]
    return LAUNCHERS[launcher](cluster, script, ranks_per_node=ranks_per_node, log=folder / "log", **options)


def until(happened: Callable[[], bool], started: Any, folder: Path) -> None:
    limit = time.monotonic() + START_S
    while not happened():
        assert time.monotonic() < limit, said(folder)
        assert all(each.poll() is None for each in started), said(folder)
        time.sleep(0.1)


def lose(cluster: Cluster, how: str, node: Node) -> None:
    {"kill": cluster.kill, "cut": cluster.cut}[how](node)
