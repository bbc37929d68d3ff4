"""Hangs: ranks that wait for one another, or for one that does not come, named with their collective and the user's line."""

from lightning_sp.comm.hangs.connecting import Connecting
from lightning_sp.comm.hangs.runs import (
    destroyed_in_run,
    end_run,
    is_in_run,
    is_watched,
    leave_run,
    tell_end_of_script,
    tell_error_of_script,
    watch_run,
    why_scripts_ended,
)

__all__ = [
    "Connecting",
    "destroyed_in_run",
    "end_run",
    "is_in_run",
    "is_watched",
    "leave_run",
    "tell_end_of_script",
    "tell_error_of_script",
    "watch_run",
    "why_scripts_ended",
]
