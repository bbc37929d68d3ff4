"""All behaviours, registered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.trainer.behaviours import (
    callbacks_of_lightning,
    checkpoints,
    failures,
    hooks,
    loggers,
    logs,
    loops,
    models,
    optimizers,
)
from tests.trainer.behaviours.harness import BEHAVIOURS, Run, answer

ROOMS = (logs, loops, checkpoints, callbacks_of_lightning, loggers, hooks, models, optimizers, failures)


def runs(names: list[str], strategy: dict[str, Any] | None, world: int, folder: str) -> dict[str, Any]:
    """Run behaviours one after the other, each in a folder of its own; return the answer of each."""
    return {name: answer(BEHAVIOURS[name], Run(strategy, world, Path(folder) / name)) for name in names}
