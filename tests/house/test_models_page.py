"""docs/models.md says how it is made and of which versions, and its numbers are those of its rows."""

import re
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from tools.models.outcome import BEST_FIRST
from tools.models.page import COMMAND, PAGE, page, read_page

ROOT = Path(__file__).parents[2]


def test_its_head_names_the_command_and_the_versions():
    constraints = (ROOT / "constraints.txt").read_text()
    transformers, torch = (
        re.search(rf"^{name}==([\d.]+)", constraints, re.MULTILINE)[1] for name in ("transformers", "torch")
    )
    head = PAGE.read_text().partition("\n|")[0]
    assert f"`{COMMAND}` writes this page" in head
    assert f'`{COMMAND} ARGS="bert llama"` renews rows' in head
    assert f"It was written with transformers {transformers} and torch {torch}." in head
    assert re.search(rf"^{COMMAND.removeprefix('make ')}: .*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_it_is_what_the_tool_writes_of_its_rows():
    rows, text = read_page(PAGE.read_text()), PAGE.read_text()
    written_with = re.search(r"transformers (\S+) and torch (\S+)\.\n", text).groups()
    if written_with == tuple(version(name).partition("+")[0] for name in ("transformers", "torch")):
        assert page(rows) == text
    assert {outcome for row in rows for outcome in row.outcomes} <= {*BEST_FIRST, "-"}
    assert all(row.reasons for row in rows if {"refused", "not compared"} & set(row.outcomes)), (
        "a refusal without its reason"
    )
    assert len({(row.model_type, row.kind) for row in rows}) == len(rows)


def test_its_counts_are_those_of_its_rows():
    rows = read_page(PAGE.read_text())
    counts = Counter(row.outcomes[1] for row in rows)
    numbers = re.findall(r"^\| (?:Model types|Heads), logits \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    summed = [sum(each) for each in zip(*([int(n) for n in line.split(" | ")] for line in numbers), strict=True)]
    assert summed == [counts[outcome] for outcome in BEST_FIRST]
