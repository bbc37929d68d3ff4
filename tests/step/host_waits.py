"""Prints what a step's host does, of a plain step, of one in which the user makes waits, of one with host memory: a process of its own."""

from __future__ import annotations

import json
from unittest import mock

from benchmarks.steps import scale
from benchmarks.steps.scale import World, count

if __name__ == "__main__":
    worlds = [World(size=16, ulysses=4, ring=4, documents=documents, plants=documents > 1) for documents in (1, 37)]
    worlds.append(World(size=16, ulysses=4, ring=4, host=True))
    # A step is like the one before it once there was one.
    with mock.patch.multiple(scale, WARMUP_STEPS=1, COUNTED_STEPS=1):
        print(json.dumps([count(world) for world in worlds]))
