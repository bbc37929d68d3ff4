"""What each process of the tests does first, those of ranks too. It saves time, and changes nothing that a test sees."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import os

# Where ranks outnumber the cores, gloo's thread spins on a lock whose owner waits for a core. A batch process is not interrupted by
# every message that arrives: a sixth of the suite's time (docs/log/structure.md). What a process starts inherits it.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# Each Trainer reads the entry points of all installed packages, and nothing is installed meanwhile.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)

# Small models make many small objects: the garbage of 10,000 instead of 700 at a time, a thirtieth of a fit (docs/log/structure.md).
gc.set_threshold(10_000, 10, 10)
