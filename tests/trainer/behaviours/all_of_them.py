"""All behaviours, registered."""

from tests.trainer.behaviours import logs, loops, models, watchers
from tests.trainer.behaviours.harness import runs

__all__ = ["logs", "loops", "models", "runs", "watchers"]
