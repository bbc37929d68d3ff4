"""Writes docs/replaced.md: `python -m tests.trainer.replaced.page`."""

from __future__ import annotations

import ast
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path

from lightning_sp.testing import RankPool
from tests.trainer.replaced.found import OF_AN_OBJECT, PACKAGE, Found, Place
from tests.trainer.replaced.runs import RUNS, looked_at

TARGET = Path(__file__).parents[3] / "docs" / "replaced.md"
MOMENTS = (
    "building",
    "a trial",
    "a step",
    "a backward",
    "between steps",
    "an evaluation",
    "a checkpoint",
    "afterwards",
)
THROUGHOUT = {"a step", "between steps", "an evaluation"}
HEAD = """# What of other libraries is replaced

`python -m tests.trainer.replaced.page` writes this page, `pytest tests/trainer/replaced` holds it true.

A row names functions of torch, Lightning, transformers, peft or Python in whose place this package's stood when a user's
code looked: while the model was built, in a trial of the preflight, in a step, in its backward, between steps,
in an evaluation, behind the run. It is found by comparison with what these libraries held before, in {count} runs on two
ranks: {runs}. What no run of these needs is not here: torch.compile, models that are read from a folder, quantized
weights. A public hook or a subclass is no replacement and not here either.

What a new version of a library breaks here is likely to be in one of these rows.
"""
OF_FUNCTIONS = """
## Functions of modules and classes

All of them are put back behind a run, also one that fails: none is there afterwards.

| by | which is for | when | functions |
|---|---|---|---|
"""
OF_OBJECTS = """
## Methods of single objects

Of a trainer, its loops, or a model of this strategy. Other objects of the class have their own; those that are there
"afterwards" go with the object.

| by | which is for | when | methods |
|---|---|---|---|
"""


def page(found: Found) -> str:
    """Return the page of what was found in all runs."""
    rows = [(name, file, when(moments)) for (name, file), moments in found.items()]
    functions = [row for row in rows if not row[0].endswith(OF_AN_OBJECT)]
    methods = [
        (name.removesuffix(OF_AN_OBJECT), file, words) for name, file, words in rows if name.endswith(OF_AN_OBJECT)
    ]
    head = _filled(HEAD.format(count=len(RUNS), runs="; ".join(RUNS)))
    return f"{head}{OF_FUNCTIONS}{table(functions)}{OF_OBJECTS}{table(methods)}"


def table(rows: Iterable[tuple[str, str, str]]) -> str:
    """Return the lines of what the rows name, those of one file and one time together."""
    together: dict[tuple[str, str], list[str]] = {}
    for name, file, words in sorted(rows, key=lambda row: (row[1], row[0])):
        together.setdefault((file, words), []).append(f"`{name}`")
    return "".join(
        f"| `{file}` | {_purpose(file)} | {words} | {', '.join(names)} |\n" for (file, words), names in together.items()
    )


def places_told(text: str) -> set[Place]:
    """Return the places that a page has."""
    functions, methods = text.split(OF_OBJECTS.strip().partition("\n")[0])
    return {
        (f"{name}{ending}", row.split("`")[1])
        for part, ending in ((functions, ""), (methods, OF_AN_OBJECT))
        for row in part.splitlines()
        if row.startswith("| `")
        for name in row.rpartition(" | ")[2].split("`")[1::2]
    }


def when(moments: Iterable[str]) -> str:
    """Return moments in words."""
    seen = set(moments)
    if seen >= THROUGHOUT:
        return "from the set-up on, and afterwards" if "afterwards" in seen else "throughout a run"
    return ", ".join(each for each in MOMENTS if each in seen)


def _purpose(file: str) -> str:
    """Return the first sentence of what a file says it is for."""
    text = " ".join((ast.get_docstring(ast.parse((PACKAGE / file).read_text())) or "").partition("\n\n")[0].split())
    return text.replace("|", "\\|").rstrip(".")


def _filled(text: str) -> str:
    """Return text with no line longer than 120 characters."""
    parts = (textwrap.fill(each, 120) if not each.startswith("#") else each for each in text.strip().split("\n\n"))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    all_found: Found = {}
    for run in RUNS:
        with tempfile.TemporaryDirectory() as folder, RankPool(2, timeout_s=900) as pool:
            for one_place, its_moments in pool.run(looked_at, [run], folder)[0].items():
                all_found.setdefault(one_place, set()).update(its_moments)
        print(f"{run}: {len(all_found)} replaced so far", flush=True)
    TARGET.write_text(page(all_found))
    print(f"wrote {TARGET}")
