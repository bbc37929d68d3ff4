"""Prints what a step's host does: of a plain step, one in which the user makes waits, one with host memory, as named. A process of its own."""

from __future__ import annotations

import json
import sys
from unittest import mock

from benchmarks.steps import scale
from benchmarks.steps.scale import World, count

if __name__ == "__main__":
    worlds = {
        "whole": World(size=16, ulysses=4, ring=4, documents=1),
        "planted": World(size=16, ulysses=4, ring=4, documents=37, plants=True),
        "host": World(size=16, ulysses=4, ring=4, host=True),
    }
    # A step is like the one before it once there was one.
    with mock.patch.multiple(scale, WARMUP_STEPS=1, COUNTED_STEPS=1):
        print(json.dumps({name: count(worlds[name]) for name in sys.argv[1:]}))
