"""The ranks that Lightning's launcher starts, as it watches them."""

from __future__ import annotations

import subprocess
import sys
import time

from lightning_sp.trainer.processes.launchers import ChildRank


def test_the_end_of_a_rank_is_told_a_moment_later():
    """Lightning kills the first process when it hears of it, and that one has to say why its run ends."""
    with subprocess.Popen([sys.executable, "-c", "import sys; input(); sys.exit(3)"], stdin=subprocess.PIPE) as process:
        rank = ChildRank(process, grace_s=0.5)
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
