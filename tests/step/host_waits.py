"""Prints what a step's host does, of a plain step, of one in which the user makes waits, of one with host memory: a process of its own."""

from __future__ import annotations

import json

from benchmarks.scale import World, count

if __name__ == "__main__":
    worlds = [World(size=16, ulysses=4, ring=4, documents=documents, plants=documents > 1) for documents in (1, 37)]
    worlds.append(World(size=16, ulysses=4, ring=4, host=True))
    print(json.dumps([count(world) for world in worlds]))
