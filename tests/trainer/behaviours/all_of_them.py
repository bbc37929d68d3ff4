"""All behaviours, registered."""

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
from tests.trainer.behaviours.harness import runs

ROOMS = (logs, loops, checkpoints, callbacks_of_lightning, loggers, hooks, models, optimizers, failures)
__all__ = ["ROOMS", "runs"]
