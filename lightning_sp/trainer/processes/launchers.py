"""Lightning's launchers, through which a whole run goes: what fails between ranks in it is said in words of this package.

Where torchrun or SLURM has started the ranks, Lightning itself has no launcher.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_sp import comm
from lightning_sp.trainer.processes.parent import STARTED_BY


class ScriptLauncher(_SubprocessScriptLauncher):
    """Starts the other ranks of this host by running the script again."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        # The ranks get this environment.
        os.environ[STARTED_BY] = str(os.getpid())
        return super().launch(_run, function, *args, trainer=trainer, **kwargs)


class ExternalLauncher(_Launcher):
    """Starts nothing: each rank is there."""

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        return _run(function, *args, **kwargs)

    @override
    def kill(self, signum: Any) -> None:
        """Leave the ranks to who started them."""


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a whole run.

    Raises:
        SequenceParallelError: a rank was lost, or the ranks cannot reach one another.
    """
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if (named := comm.connection_error(error)) is not None:
            raise named from error
        raise
