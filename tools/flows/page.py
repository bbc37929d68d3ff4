"""docs/flows.md: a row for each flow, what came of it, and the reasons of those that are refused.

The page can be read back: a row that is not tried again stays as it was.
"""

from __future__ import annotations

import importlib.metadata
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tools.flows.registry import ROOT, Flow
from tools.models.outcome import BEST_FIRST

PAGE = ROOT / "docs" / "flows.md"
COMMAND = "make flows"
HEAD = """# What users do around a model

`{command}` writes this page; `{command} ARGS="dpo lora"` renews rows.
It was written with transformers {transformers}, datasets {datasets}, torchdata {torchdata}, TRL {trl}, PEFT {peft} and
torch {torch}.

Each flow is a script of `tests/flows/`, as its user would write it. It runs in float64 on one device under plain
Lightning, and under `SequenceParallelStrategy` at Ulysses 2, at ring 2, and at 2 data-parallel groups of ring 2. Exact
means: all three leave the weights of one device, and the same metrics and outputs. Dropout is off. A
script whose `LAYOUTS` names others ran in those: numbers by hand, and losses that compare rows, are averaged over
data-parallel groups as DDP does, which is not one device's mean.

"""
TITLES = {"data": "Data", "losses": "Losses", "models": "Models", "trainer": "The Trainer"}
COLUMNS = ("script", "what", "outcome", "why")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the page says of a flow.

    Args:
        what: the script's first line.
        why: empty where the outcome is exact.
    """

    topic: str
    name: str
    what: str
    outcome: str
    why: str = ""


def row_of(flow: Flow, answer: dict[str, Any]) -> Row:
    """Return a flow's row. Of a long reason the first sentences are enough: losses and shapes of one run are left out."""
    why = " ".join(str(answer.get("why", "")).split()) if answer["outcome"] != "exact" else ""
    return Row(topic=flow.topic, name=flow.name, what=flow.title, outcome=answer["outcome"], why=_brief(why))


def write_page(rows: Sequence[Row]) -> None:
    """Write the page."""
    PAGE.write_text(page(rows))


def page(rows: Sequence[Row]) -> str:
    """Return the page."""
    reasons = list(dict.fromkeys(row.why for row in rows if row.why))
    text = HEAD.format(
        command=COMMAND,
        **{name: _version(name) for name in ("transformers", "datasets", "torchdata", "trl", "peft", "torch")},
    )
    counts = Counter(row.outcome for row in rows)
    text += _table(BEST_FIRST, [[str(counts[outcome]) for outcome in BEST_FIRST]])
    for topic, title in TITLES.items():
        lines = [
            [f"`{row.name}`", row.what, row.outcome, str(reasons.index(row.why) + 1) if row.why else ""]
            for row in rows
            if row.topic == topic
        ]
        text += f"\n## {title}\n\n`tests/flows/{topic}/`\n\n{_table(COLUMNS, lines)}"
    text += "\n## Why\n\n"
    for number, reason in enumerate(reasons, 1):
        text += textwrap.fill(f"{number}. {reason}", 118, subsequent_indent="   ", break_long_words=False) + "\n"
    return text


def read_page(text: str) -> list[Row]:
    """Return the rows of a page."""
    why = text.partition("\n## Why\n")[2]
    reasons = {n: " ".join(said.split()) for n, said in re.findall(r"^(\d+)\. (.*(?:\n   .*)*)", why, re.MULTILINE)}
    topics, topic, rows = {title: topic for topic, title in TITLES.items()}, "", []
    for line in text.splitlines():
        if line.startswith("## "):
            topic = topics.get(line[3:], "")
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if topic and len(cells) == len(COLUMNS) and cells[0].startswith("`"):
            name, what, outcome, number = cells
            rows.append(Row(topic=topic, name=name.strip("`"), what=what, outcome=outcome, why=reasons.get(number, "")))
    return rows


def _brief(why: str) -> str:
    """Return a reason without the numbers of one run."""
    return re.split(r" \(allowed|: \[|: \(1\)", why)[0]


def _version(name: str) -> str:
    return importlib.metadata.version(name).partition("+")[0]


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *lines))
