"""Lightning's launchers, through which a whole run goes: what fails between ranks in it is said in words of this package.

Where torchrun or SLURM has started the ranks, Lightning itself has no launcher.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, cast

from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError, told_error
from lightning_sp.trainer.processes.other_ranks import wait_at_exit, wait_no_more
from lightning_sp.trainer.processes.parent import RUN, STARTED_BY, STARTED_IN, is_stopped, note_started

# On a busy machine the first process takes seconds from the error of a connection to its own.
_SAYS_WHY_S = 8.0


class ChildRank:
    """A rank's process, whose end is told a moment later: Lightning kills this process when it hears of it, and it has to say why first.

    Between runs it has nothing to say.

    Args:
        process: the rank's.
        grace_s: how long this process has.
        says_why: whether it has that now.
    """

    def __init__(
        self,
        process: subprocess.Popen[Any],
        grace_s: float = _SAYS_WHY_S,
        says_why: Callable[[], bool] = comm.is_in_run,
    ) -> None:
        self._process, self._grace_s, self._says_why = process, grace_s, says_why
        self._ended_at: float | None = None
        self.pid, self.send_signal, self.kill, self.wait = process.pid, process.send_signal, process.kill, process.wait

    @property
    def returncode(self) -> int | None:
        """The code with which it has ended."""
        return self.poll()

    def poll_now(self) -> int | None:
        """Return the code with which it has ended, None for none."""
        return self._process.poll()

    def poll(self) -> int | None:
        """Return the code with which it has ended, None for a while after its end, too."""
        code = self._process.poll()
        if code is not None and self._ended_at is None:
            self._ended_at = time.monotonic()
        if self._ended_at is None or (time.monotonic() - self._ended_at < self._grace_s and self._says_why()):
            return None
        return code


class ScriptLauncher(_SubprocessScriptLauncher):
    """Starts the other ranks of this host by running the script again.

    Args:
        given: Lightning's.
        late_s: how long a rank may be later than this one at the end of the script.
    """

    def __init__(self, *given: Any, late_s: float) -> None:
        super().__init__(*given)
        self._late_s = late_s

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        """Whether a notebook or a prompt may train; Lightning asks there alone.

        Raises:
            SequenceParallelError: it would have to start ranks.
        """
        if (num_ranks := self.num_processes * self.num_nodes) > 1:
            raise SequenceParallelError(
                f"a notebook or a prompt cannot start {num_ranks} ranks: Lightning starts each by running the script once more, and there is "
                "none here; write the lines into a file and start that, `!python train.py` in a cell, or `torchrun --nproc-per-node="
                f"{self.num_processes} train.py`; with devices=1 one rank trains here"
            )
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        comm.check_port()
        if self.num_nodes == 1:
            comm.check_address_here(self.cluster_environment.main_address)
        try:
            return super().launch(run, function, *args, trainer=trainer, **kwargs)
        except BaseException:
            self.kill_stopped()
            raise

    @override
    def _call_children_scripts(self) -> None:
        os.environ[STARTED_BY] = str(os.getpid())  # the ranks get this environment
        os.environ[STARTED_IN] = "main" if threading.current_thread() is threading.main_thread() else ""
        os.environ[RUN] = uuid.uuid4().hex if self.num_nodes == 1 else ""
        note_started(os.environ[RUN])
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[STARTED_BY], os.environ[STARTED_IN], os.environ[RUN]
        wait_at_exit(self.procs, late_s=self._late_s, tell=comm.tell_end_of_script)
        # Lightning's observer gets this list.
        self.procs[:] = [cast(Any, ChildRank(each)) for each in self.procs]

    def ended(self) -> str:
        """Return which of the ranks that this process has started have ended, and how; empty for none."""
        ranks = cast(list[ChildRank], self.procs)
        codes = {rank: (each.pid, each.poll_now()) for rank, each in enumerate(ranks, 1)}
        return ", ".join(
            f"rank {rank} (process {pid}) has ended with code {code}"
            for rank, (pid, code) in codes.items()
            if code is not None
        )

    def kill_stopped(self) -> None:
        """Kill the ranks that are stopped: they do not see that the run has ended, and keep their memory and device."""
        for each in self.procs:
            if is_stopped(each.pid):
                each.kill()


class ExternalLauncher(_Launcher):
    """Starts nothing: each rank is there."""

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        return run(function, *args, **kwargs)

    @override
    def kill(self, signum: Any) -> None:
        """Leave the ranks to who started them."""


def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a whole run, or what all ranks call behind one.

    Raises:
        SequenceParallelError: a rank was lost, the ranks cannot reach one another, or this one has destroyed its groups.
    """
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        wait_no_more()
        # An exit and an interrupt end a run too, and the other ranks would wait.
        is_lost = isinstance(error, Exception) and comm.is_of_other_ranks(error)
        told = comm.leave_run(error, is_lost=is_lost)
        if isinstance(error, Exception) and (where := comm.destroyed_in_run()):
            raise SequenceParallelError(
                f"this rank {where}: every message between ranks needs them, to the end of the run; call "
                f"torch.distributed.destroy_process_group after trainer.fit, on all ranks ({told_error(error)})"
            ) from error
        if isinstance(error, Exception) and (named := comm.connection_error(error, told)) is not None:
            raise named from error
        raise
