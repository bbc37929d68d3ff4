"""Writes docs/behaviours.md: `python -m tests.trainer.behaviours.page`."""

from __future__ import annotations

from pathlib import Path

from tests.trainer.behaviours.all_of_them import ROOMS
from tests.trainer.behaviours.harness import BEHAVIOURS, Behaviour
from tests.trainer.behaviours.outcomes import outcome

TARGET = Path(__file__).parents[3] / "docs" / "behaviours.md"
HEAD = """# Behaviours of Lightning, tried

`python -m tests.trainer.behaviours.page` writes this page. `tests/trainer/behaviours/test_behaviours.py` holds it true.

Each is a few lines of a user's, run on two ranks of one sequence and under plain Lightning on one process: losses,
steps, logged numbers, files, and every weight in float64. *As one device* means that all of them agree. What is
refused says why in its message; [refusals.md](refusals.md) has the reasons. Most run in two data-parallel groups as
well, where a number of a batch is a group's own, as with DDP. [lightning.md](lightning.md) says the same by
argument, callback and hook.
"""


def page() -> str:
    """Return the page: a table for each room."""
    parts = [HEAD]
    for room in ROOMS:
        title = (room.__doc__ or "").strip().rstrip(".")
        names = [name for name, each in BEHAVIOURS.items() if _is_of(each, room.__name__)]
        rows = [(name.replace("_", " "), outcome(name)) for name in names]
        lines = [f"| {name} | {said} |" for name, said in rows]
        parts.append("\n".join([f"## {title}", "", "| behaviour | here |", "|---|---|", *lines]) + "\n")
    return "\n".join(parts)


def _is_of(behaviour: Behaviour, room: str) -> bool:
    return behaviour.__module__ == room


if __name__ == "__main__":
    TARGET.write_text(page())
    print(f"wrote {TARGET}")
