"""torchrun starts ranks again, as many, fewer or more: the run goes on from its newest checkpoint. Real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
# Agents find in seconds that another is gone, not in 15; on a busy machine the second one comes late.
QUICK = "--rdzv-conf=last_call_timeout=20,keep_alive_interval=1,keep_alive_max_attempt=8"


def agent(
    folder: Path, dies: str, *options: str, conf: str = "", variables: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--rdzv-backend=c10d",
        "--rdzv-id=elastic",
        QUICK + conf,
        "--max-restarts=2",
    ]
    return subprocess.Popen(
        [*command, *options, "--no-python", sys.executable, "-W", "ignore", "-m", "tests.trainer.processes.elastic_run", str(folder), dies],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **(variables or {})},
    )  # fmt: skip


def losses(folder: Path) -> tuple[dict[int, float], dict[int, int]]:
    """Return each step's loss and number of ranks, of its last life."""
    lines = [line.split() for line in (folder / "losses.txt").read_text().splitlines()]
    return {int(step): float(loss) for step, _, loss in lines}, {int(step): int(ranks) for step, ranks, _ in lines}


def endpoint() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("whole")
    with agent(folder, "whole", "--nnodes=1", "--nproc-per-node=1", f"--rdzv-endpoint={endpoint()}") as only:
        words, _ = only.communicate(timeout=600)
        assert only.returncode == 0, words
    return losses(folder)[0]


def test_a_rank_that_dies_is_started_again_with_the_others(whole: dict[int, float], tmp_path: Path):
    with agent(tmp_path, "rank", "--nnodes=1", "--nproc-per-node=2", f"--rdzv-endpoint={endpoint()}") as only:
        words, _ = only.communicate(timeout=600)
        assert only.returncode == 0, words
    found, ranks = losses(tmp_path)
    assert found == pytest.approx(whole, abs=1e-10)
    assert set(ranks.values()) == {2}
    assert "Restoring states from the checkpoint path at" in words
    assert "the checkpoint is of" not in words


def test_a_node_that_is_lost_is_done_without(whole: dict[int, float], tmp_path: Path):
    options = "--nnodes=1:2", "--nproc-per-node=1", f"--rdzv-endpoint={endpoint()}"
    with (
        # The store is the first one's, whichever comes first: the node that is lost is the second.
        agent(tmp_path, "node", *options, "--local-addr=127.0.0.1", conf=",is_host=1") as first,
        agent(tmp_path, "node", *options, "--local-addr=127.0.0.1", conf=",is_host=0") as second,
    ):
        words, others = first.communicate(timeout=900)[0], second.communicate(timeout=900)[0]
    assert 0 in (first.returncode, second.returncode), words + others
    found, ranks = losses(tmp_path)
    assert found == pytest.approx(whole, abs=1e-10)
    assert (ranks[3], ranks[4], ranks[7]) == (2, 1, 1)


def test_a_node_that_joins_is_made_use_of(whole: dict[int, float], tmp_path: Path):
    options = "--nnodes=1:2", "--nproc-per-node=1", f"--rdzv-endpoint={endpoint()}", "--local-addr=127.0.0.1"
    # torchrun's first agent tells a node that joins no address where agents share their store: both end after a minute.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with agent(tmp_path, "slow", *options, conf=",is_host=1", variables=own_store) as first:
        until_step(4, tmp_path, first)
        with agent(tmp_path, "slow", *options, conf=",is_host=0", variables=own_store) as second:
            words, others = first.communicate(timeout=900)[0], second.communicate(timeout=900)[0]
    assert (first.returncode, second.returncode) == (0, 0), words + others
    found, ranks = losses(tmp_path)
    assert found == pytest.approx(whole, abs=1e-10)
    assert (ranks[3], ranks[7]) == (1, 2)
    assert "the checkpoint is of 1 rank (" in words
    assert "; this run of 2 ranks (" in words


def until_step(step: int, folder: Path, started: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 300
    while not (folder / "losses.txt").exists() or step not in losses(folder)[0]:
        assert started.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.1)
