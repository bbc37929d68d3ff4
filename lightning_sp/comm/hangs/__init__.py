"""Hangs: ranks that wait for one another, or for one that does not come, named with their collective and the user's line."""

from lightning_sp.comm.hangs.runs import destroyed_in_run, end_run, leave_run, watch_run

__all__ = ["destroyed_in_run", "end_run", "leave_run", "watch_run"]
