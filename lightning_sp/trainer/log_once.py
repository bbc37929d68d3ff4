"""Messages that a run logs once, on rank 0."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core.rank_zero import rank_zero_warn


class LogOnce:
    """Logs the first message of each topic; a class because it remembers the topics."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def __call__(self, message: str, *, topic: str) -> None:
        """Log a message of ours on rank 0, unless there was one of its topic."""
        if topic not in self._logged:
            self._logged.add(topic)
            rank_zero_info(f"sequence_parallel: {message}")

    def warn(self, message: str, *, topic: str) -> None:
        """Warn on rank 0, unless there was a message of its topic."""
        if topic not in self._logged:
            self._logged.add(topic)
            rank_zero_warn(f"sequence_parallel: {message}")
