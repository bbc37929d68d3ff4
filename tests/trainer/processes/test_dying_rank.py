"""A rank that dies ends the others, and its own traceback is shown."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_sp.testing import run_ranks
from tests.trainer.processes import dying_rank

ROOT = Path(__file__).parents[3]
FILE = "tests/trainer/processes/dying_rank.py"
NAMED = f"rank 0 of 2 on host {{host}} has lost another rank: rank 1 has raised ValueError: boom on rank 1, in {FILE}:"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    # Ranks that are called show the same of one that exits.
    [("exit", "RuntimeError"), ("raise", NAMED)],
)
def test_a_rank_that_dies_ends_the_others(how, words):
    # Far below the strategy's timeout of 300 s: the peers notice the closed connection, not the timeout.
    command = [sys.executable, "-W", "ignore", "-m", "tests.trainer.processes.dying_rank", how]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode != 0
    assert "boom on rank 1" in ended.stderr or how == "exit"
    assert words.format(host=socket.gethostname()) in ended.stderr, ended.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
def test_a_rank_that_hangs_ends_with_the_process_that_started_it(launcher):
    """It hangs in its user's code, where no collective would tell it; the other is killed, and cannot."""
    module = ["-W", "ignore", "-m", "tests.trainer.processes.dying_rank", "hang"]
    start = (
        []
        if launcher == "lightning"
        else ["-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python", sys.executable]
    )
    with subprocess.Popen([sys.executable, *start, *module], cwd=ROOT, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "hangs\n"
        children = _children(started.pid)
        assert len(children) == (1 if launcher == "lightning" else 2)
        started.kill()
        ended = time.monotonic()
        while any(map(_is_running, children)) and time.monotonic() < ended + 30:
            time.sleep(0.1)
        assert time.monotonic() - ended < 5 + (launcher == "torchrun")
        assert not any(map(_is_running, children))


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_a_rank_that_exits_is_an_error_on_the_others():
    """The others fail in their next collective, far below the limits of 300 s and, here, of a call."""
    with pytest.raises(RuntimeError) as ended:
        run_ranks(dying_rank.fit, 2, "exit", timeout_s=100, others_s=60)
    first, _, rest = str(ended.value).partition("\nranks ")
    assert first.startswith("rank 0 of 2 failed first:")
    assert "\nRuntimeError: " in first
    assert re.fullmatch(r"\[1\] have ended without an answer, with exit codes \[-?\d+\]", rest)
