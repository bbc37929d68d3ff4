"""Hangs: ranks that wait for one another, or for one that does not come, named with their collective and the user's line."""

from lightning_sp.comm.hangs.runs import destroyed_in_run, end_run, is_in_run, leave_run, tell_end_of_script, watch_run

__all__ = ["destroyed_in_run", "end_run", "is_in_run", "leave_run", "tell_end_of_script", "watch_run"]
