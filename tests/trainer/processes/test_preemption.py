"""A run that is told to end, as its user's scheduler does it: real processes, a real signal, and the run that goes on."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from threading import Timer

import pytest

from lightning_sp.trainer.processes.sigterm import Sigterm
from lightning_sp.trainer.processes.time_limit import Limit, TimeLimit

ROOT = Path(__file__).parents[3]
SCRIPT = ["-W", "ignore", "-m", "tests.trainer.processes.preempted_run"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python", sys.executable]
SCONTROL = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/asked"
"""


def started(
    folder: Path, how: str, start: list[str], environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *start, *SCRIPT, str(folder), how],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **(environment or {})},
    )  # fmt: skip


def until_begun(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line == "begun\n":
            return
    raise AssertionError("it has ended")


def losses(folder: Path) -> dict[str, str]:
    lines = [line.split() for line in (folder / "losses.txt").read_text().splitlines()]
    assert len({step for step, _ in lines}) == len(lines)
    return dict(map(tuple, lines))


def waits_where_no_handler_runs(heard: Path, how: str) -> None:
    """Wait for a lock of C's, as a rank does for a collective."""
    sys.stderr = heard.open("w")
    signal.signal(signal.SIGTERM, lambda *_: None)
    limit = TimeLimit()
    limit.start(Limit(within_s=0.2, code=85, at=lambda: "train, step 4"), {signal.SIGTERM})
    if how == "stopped":
        limit.stop()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        os._exit(0)
    if how == "begun":
        limit.begin()
    else:
        Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    lock, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    for _ in range(2):
        library.pthread_mutex_lock(lock)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize(("how", "code"), [("told", 85), ("begun", 85), ("stopped", 0)])
def test_a_process_ends_in_time_whatever_it_waits_for(tmp_path: Path, how: str, code: int):
    said = tmp_path / "said"
    said.touch()
    process = multiprocessing.get_context("fork").Process(target=waits_where_no_handler_runs, args=(said, how))
    process.start()
    process.join(30)
    assert process.exitcode == code
    words = f"process {process.pid} was told to end 0.2 s ago and is still at train, step 4: it ends now, with code 85, and what it was about"
    assert (words in said.read_text()) == (code != 0)
    assert "preemption_limit_s=0.2 is the limit" in said.read_text() or not code


def waits_in_setup(said: Path, mine: bool) -> None:
    """Wait in native code, as a setup does, until another thread sends the signal; a handler of the user's own stays."""
    sys.stderr = said.open("w")
    signal.signal(signal.SIGTERM, own_handler if mine else signal.SIG_DFL)
    told = Sigterm()
    limit = Limit(within_s=300.0, code=85, at=lambda: "train, step 0")
    told.begin(limit, None, is_script_child=False)
    assert (signal.getsignal(signal.SIGTERM) is own_handler) == mine
    Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    if mine:
        time.sleep(0.5)
        os._exit(0)
    lock, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    for _ in range(2):
        library.pthread_mutex_lock(lock)


def own_handler(signum: int, frame: object) -> None:
    """Stand for a user's."""


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize(("mine", "code"), [(False, 85), (True, 0)])
def test_a_process_that_is_told_to_end_in_its_setup_does_so_at_once(tmp_path: Path, mine: bool, code: int):
    said = tmp_path / "said"
    said.touch()
    process = multiprocessing.get_context("fork").Process(target=waits_in_setup, args=(said, mine))
    process.start()
    process.join(10)
    process.kill()
    process.join()
    assert process.exitcode == code
    words = f"process {process.pid} was told to end at train, step 0, before the first batch of its run: it ends now, with code 85, and nothing"
    assert (words in said.read_text()) == (not mine)


def has_a_worker_that_is_ended() -> None:
    limit, fork = TimeLimit(), multiprocessing.get_context("fork")
    signal.signal(signal.SIGTERM, lambda *_: None)
    limit.start(Limit(within_s=0.1, code=85, at=lambda: "here"), {signal.SIGTERM})
    worker = fork.Process(target=time.sleep, args=(0.5,))
    worker.start()
    time.sleep(0.1)
    worker.terminate()
    worker.join()
    time.sleep(0.3)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_signal_to_a_worker_of_a_process_is_the_workers_own():
    process = multiprocessing.get_context("fork").Process(target=has_a_worker_that_is_ended)
    process.start()
    process.join(30)
    assert process.exitcode == 0


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
def test_a_signal_to_the_launcher_ends_the_run_saved(launcher: str, tmp_path: Path):
    start = [] if launcher == "lightning" else TORCHRUN
    whole, told = tmp_path / "whole", tmp_path / "told"
    for each in (whole, told):
        each.mkdir()
    with started(whole, "goes", start) as process:
        words, _ = process.communicate(timeout=200)
        assert process.returncode == 0, words
    with started(told, "waits", start) as process:
        until_begun(process)
        process.send_signal(signal.SIGTERM)
        words, _ = process.communicate(timeout=200)
        # torchrun, told itself, ends with 1 whatever its ranks end with.
        assert process.returncode == (143 if launcher == "lightning" else 1), words
    assert "the run was told to end, and is saved at step 6" in words
    assert sorted(each.name for each in (told / "checkpoints").iterdir()) == [
        "epoch=0-step=6.ckpt",
        "last-preempted.ckpt",
    ]
    with started(told, "goes", start) as process:
        words, _ = process.communicate(timeout=200)
        assert process.returncode == 0, words
    assert losses(told) == losses(whole)


@pytest.mark.slow
def test_a_rank_that_cannot_end_in_time_says_so(tmp_path: Path):
    with started(tmp_path, "hangs", []) as process:
        until_begun(process)
        process.send_signal(signal.SIGTERM)
        at = time.monotonic()
        words, _ = process.communicate(timeout=100)
        assert process.returncode == 143
        assert time.monotonic() - at < 8
    assert "was told to end 3 s ago and is still at train, step 4, batch 4: it ends now, with code 143" in words


@pytest.mark.slow
def test_slurm_is_asked_to_queue_the_job_again(tmp_path: Path):
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(SCONTROL)
    scontrol.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def rank(index: int, how: str) -> subprocess.Popen[str]:
        slurm = {
            "SLURM_JOB_ID": "123", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": str(index),
            "SLURM_LOCALID": str(index), "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost", "MASTER_PORT": port,
            "PATH": f"{scontrol.parent}:{os.environ['PATH']}",
        }  # fmt: skip
        return started(tmp_path, how, [], slurm)

    with rank(0, "waits") as first, rank(1, "waits") as second:
        until_begun(first)
        # Of all ranks, as srun does it.
        first.send_signal(signal.SIGUSR1)
        second.send_signal(signal.SIGUSR1)
        words, others = first.communicate(timeout=200)[0], second.communicate(timeout=200)[0]
        assert (first.returncode, second.returncode) == (143, 143), words + others
    assert (scontrol.parent / "asked").read_text() == "requeue 123\n"
    assert (tmp_path / "hpc_ckpt_1.ckpt" / "manifest.json").is_file()
    with rank(0, "slurm") as first, rank(1, "slurm") as second:
        words, others = first.communicate(timeout=200)[0], second.communicate(timeout=200)[0]
        assert (first.returncode, second.returncode) == (0, 0), words + others
    assert sorted(map(int, losses(tmp_path))) == list(range(12))


def test_a_run_leaves_no_thread():
    limit = TimeLimit()
    limit.start(Limit(within_s=60.0, code=1, at=lambda: "nowhere"), ())
    assert "lightning_sp time limit" in [each.name for each in threading.enumerate()]
    limit.stop()
    assert "lightning_sp time limit" not in [each.name for each in threading.enumerate()]


def test_a_signal_while_a_run_ends_is_no_error(monkeypatch: pytest.MonkeyPatch):
    limit, join, told = TimeLimit(), threading.Thread.join, []

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        limit.begin()  # as a signal's handler does
        told.append(thread.name)
        join(thread, timeout)

    limit.start(Limit(within_s=60.0, code=1, at=lambda: "nowhere"), ())
    monkeypatch.setattr(threading.Thread, "join", joined)
    limit.stop()
    assert told == ["lightning_sp time limit"]
