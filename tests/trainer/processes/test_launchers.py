"""The ranks that Lightning's launcher starts, as it watches them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_sp.trainer.processes import launchers, other_ranks, parent
from lightning_sp.trainer.processes.launchers import ChildRank, ScriptLauncher


def test_the_end_of_a_rank_is_told_a_moment_later():
    """Lightning kills the first process when it hears of it, and that one has to say why its run ends."""
    with subprocess.Popen([sys.executable, "-c", "import sys; input(); sys.exit(3)"], stdin=subprocess.PIPE) as process:
        rank = ChildRank(process, grace_s=0.5, says_why=lambda: True)
        assert (rank.pid, rank.returncode, rank.poll()) == (process.pid, None, None)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        assert rank.wait() == 3
        ended = time.monotonic()
        while (code := rank.poll()) is None:
            time.sleep(0.01)
        assert code == rank.returncode == 3
        assert 0.4 < time.monotonic() - ended < 30
        # Between runs this process has nothing to say.
        assert ChildRank(process, grace_s=600.0, says_why=lambda: False).poll() == 3


# What a script does whose ranks are the processes of these lines, and how it ends. The module alone: the package takes seconds.
SCRIPT = """
import runpy, subprocess, sys
own = runpy.run_path({file!r})
own["wait_at_exit"]([subprocess.Popen([sys.executable, "-c", line]) for line in {ranks!r}], late_s={late_s}, tell=lambda: print("told"))
{end}
"""
LATE = "import time; time.sleep(1); print('rank 1 is done')"
FAILS = "import time; time.sleep(0.3); raise SystemExit(3)"
LONG = "import time; time.sleep(20)"
# As a rank behind its run: it has a handler that writes its lines.
STAYS = "import faulthandler, time; faulthandler.enable(); time.sleep(60)"


@pytest.mark.parametrize(
    ("ranks", "end", "code", "said"),
    [
        ([LATE, "pass"], "", 0, ""),
        (["pass", FAILS], "", 1, "rank 0 ends with code 1: rank 2 has ended with code 3 after rank 0 was done"),
        ([LONG], "own['wait_no_more']()", 0, ""),
        ([LONG], "raise SystemError('its own')", 1, "its own"),
    ],
)
def test_a_script_ends_with_its_ranks(tmp_path, ranks, end, code, said):
    script = SCRIPT.format(file=other_ranks.__file__, ranks=ranks, end=end, late_s=15)
    began = time.monotonic()
    # Files: a rank that goes on holds a pipe open.
    with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:
        done = subprocess.run([sys.executable, "-c", script], stdout=out, stderr=err, timeout=50, check=False)
    assert time.monotonic() - began < 19
    assert done.returncode == code
    told = (tmp_path / "err").read_text()
    assert said in told
    assert ("sequence_parallel: " in told) == (ranks[-1] == FAILS)
    written = (tmp_path / "out").read_text()
    assert ("rank 1 is done" in written) == (ranks[0] == LATE)
    assert ("told" in written) == ((code == 0 and not end) or ranks[-1] == FAILS)


def test_a_rank_that_stays_behind_the_script_is_ended_and_its_lines_are_shown():
    script = SCRIPT.format(file=other_ranks.__file__, ranks=[STAYS], end="", late_s=2)
    began = time.monotonic()
    # The rank has the pipe, too: it is read until that one has ended.
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=50, check=False, text=True)
    assert time.monotonic() - began < 30
    assert done.returncode == 1
    assert re.search(r"rank 0 is done and waits for rank 1 \(process \d+\), 2 s at most", done.stderr)
    assert re.search(r"ends rank 1 \(process \d+\): it went on for 2 s after rank 0, and is here\n", done.stderr)
    assert 'File "<string>", line 1 in <module>' in done.stderr
    assert "told" in done.stdout


# A rank that a script starts as `ScriptLauncher` does, and that has ended its run or is in it.
RANK = """
import os, runpy, time
watch = runpy.run_path({file!r})["ParentWatch"]()
watch.start(os.environ)
{between}
print("is there", flush=True)
time.sleep(60)
"""
STARTS = """
import os, subprocess, sys, threading, time
main = {in_main}
os.environ.update(LOCAL_RANK="1", {by}=str(os.getpid()), {in_}="main" if main else "")
def start():
    print(subprocess.Popen([sys.executable, "-c", {rank!r}]).pid, flush=True)
    time.sleep(0 if main else 60)
start() if main else threading.Thread(target=start, daemon=True).start()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("between", "in_main", "ends"),
    [
        pytest.param("", True, True, id="in its run", marks=pytest.mark.slow),
        pytest.param("watch.stop()", True, True, id="behind its run"),
        pytest.param("watch.stop(); watch.start(os.environ); watch.stop()", True, True, id="behind its second run"),
        # The thread that started it may end before its process does, and the kernel knows the thread alone.
        pytest.param("watch.stop()", False, False, id="started by a thread"),
    ],
)
def test_a_rank_ends_with_the_process_that_started_it(between, in_main, ends):
    """Behind its run no thread of ours is left: the kernel ends it."""
    rank = RANK.format(file=parent.__file__, between=between)
    script = STARTS.format(in_main=in_main, by=parent.STARTED_BY, in_=parent.STARTED_IN, rank=rank)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        pid = int(started.stdout.readline())
        assert started.stdout.readline() == "is there\n"
        started.kill()
        started.wait()
        until = time.monotonic() + (20 if ends else 2)
        while is_there(pid) and time.monotonic() < until:
            time.sleep(0.05)
        left = is_there(pid)
        if left:
            os.kill(pid, signal.SIGKILL)
    assert left != ends


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_ranks_know_their_run_and_the_environment_of_who_starts_them_stays_the_users(monkeypatch):
    given: list[dict[str, str]] = []
    monkeypatch.setattr(
        launchers._SubprocessScriptLauncher, "_call_children_scripts", lambda _: given.append(dict(os.environ))
    )
    monkeypatch.setattr(parent, "_started", [])
    monkeypatch.delenv(parent.RUN, raising=False)
    before = dict(os.environ)
    for num_nodes in (1, 2):
        launcher = ScriptLauncher(LightningEnvironment(), 2, num_nodes, late_s=1.0)
        launcher._call_children_scripts()
        assert dict(os.environ) == before
        own = parent.run_of(os.environ)
        assert given[-1][parent.RUN] == own
        assert bool(own) == (num_nodes == 1), "ranks of other nodes are started by others"
    monkeypatch.setattr(parent, "_started", [])
    assert [parent.run_of(each) for each in given] == [given[0][parent.RUN], ""]


INTERACTIVE = """
import sys
sys.ps1 = ">>> "  # what a prompt sets, and Lightning looks at
import lightning.pytorch as pl
from torch.utils.data import DataLoader
from lightning_sp import SequenceParallelError
from tests.trainer.tiny import Plain, TokenDataset, tiny_llama
options = dict(strategy="sequence_parallel", accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False)
try:
    pl.Trainer(devices=2, **options)
except SequenceParallelError as error:
    print(error)
trainer = pl.Trainer(devices=1, **options)
trainer.fit(Plain(tiny_llama), DataLoader(TokenDataset(4), batch_size=2))
print("steps:", trainer.global_step)
"""


@pytest.mark.slow
def test_at_a_prompt_one_rank_trains_and_more_are_refused():
    ended = subprocess.run(
        [sys.executable, "-c", INTERACTIVE], check=False, capture_output=True, text=True, timeout=120
    )
    assert ended.stdout.startswith("a notebook or a prompt cannot start 2 ranks: Lightning starts each"), ended.stderr
    assert ended.stdout.endswith("steps: 1\n"), ended.stderr
