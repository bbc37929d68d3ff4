"""docs/models.md: one row for each model type, one for each head, and the types without a row with the reason."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tools.models.answers import ROOT, Answers
from tools.models.batches import FORMS, forms_of
from tools.models.registry import ENTRIES, Case, left_out
from tools.models.worlds import WORST_FIRST

PAGE = ROOT / "docs" / "models.md"
COMMAND = "make models"
HEAD = """# Models of transformers

`{command}` writes this page; `{command} ARGS="bert llama"` renews rows. transformers {transformers}, torch {torch},
package {version}.

Each class is unmodified and has tiny random weights. A plain user's LightningModule trains it for three optimizer steps
in float64: once by plain Lightning on one device, once by `Trainer(strategy=SequenceParallelStrategy(...))` at Ulysses 2,
ring 2, and Ulysses 2 x ring 2. Of the three batches one has no padding, one has some on the right, one on the left.
"own loss" is `self.model(**batch).loss`; "logits" is `F.cross_entropy` on `self.model(...).logits`.

| outcome | means |
|---|---|
| exact | the weights are those of one device in all three layouts: to {error:g}, and to {part:g} of what the steps changed |
| refused | a `SequenceParallelError` on all ranks before the first step; its first line stands in the last column |
| wrong | it trained, and the weights are others |
| crash | another error, or ranks that did not answer |
| not compared | plain Lightning on one device cannot do it either, or not twice alike |

"""


def written(cases: Sequence[Case], answers: Answers) -> str:
    """Return the page: rows of this version's answers, and of the present page where it has none."""
    from tools.models.ranks import LARGEST_ERROR, LARGEST_PART  # noqa: PLC0415

    before = _rows_of(PAGE.read_text() if PAGE.exists() else "")
    rows = {case: row for case in cases if (row := _row(case, answers) or before.get(_key(case)))}
    tables = {
        "Model types": [rows[case] for case in cases if case.kind in ENTRIES and case in rows],
        "Heads": [rows[case] for case in cases if case.kind not in ENTRIES and case in rows],
    }
    text = HEAD.format(
        command=COMMAND, transformers=importlib.metadata.version("transformers"), torch=importlib.metadata.version("torch").partition("+")[0],
        version=answers.version, error=LARGEST_ERROR, part=LARGEST_PART,
    )  # fmt: skip
    text += _counts(tables)
    for title, lines in tables.items():
        text += f"\n## {title}\n\n| model type | kind | class | own loss | logits | why |\n|---|---|---|---|---|---|\n"
        text += "".join(f"{line}\n" for line in lines)
    return text + _left_out()


def _row(case: Case, answers: Answers) -> str | None:
    found = {form: answers.of(f"{case.name}, {form}") for form in forms_of(case.kind)}
    if any(answer is None for answer in found.values()) or not found:
        return None
    said: dict[str, str] = {}
    for form, answer in found.items():
        if answer is not None and "why" in answer:
            said.setdefault(_cell(answer["why"]), form)
    why = "; ".join(said) if len(said) == 1 else "; ".join(f"{form}: {text}" for text, form in said.items())
    cells = [_outcome(found.get(form)) for form in FORMS]
    return f"| {case.model_type} | {case.kind} | `{case.class_name}` | {' | '.join(cells)} | {why} |"


def _outcome(answer: dict[str, Any] | None) -> str:
    return "-" if answer is None else str(answer["outcome"])


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:300]


def _key(case: Case) -> str:
    return f"| {case.model_type} | {case.kind} |"


def _rows_of(page: str) -> dict[str, str]:
    """Return the rows of a page by their first two cells."""
    return {"|".join(line.split("|")[:3]) + "|": line for line in page.splitlines() if line.count("|") > 6}  # noqa: PLR2004


def _counts(tables: dict[str, list[str]]) -> str:
    text = "| | " + " | ".join(reversed(WORST_FIRST)) + " |\n|---|" + "---|" * len(WORST_FIRST) + "\n"
    for title, lines in tables.items():
        for form, column in zip(FORMS, (4, 5), strict=True):
            counts = Counter(line.split("|")[column].strip() for line in lines)
            numbers = " | ".join(str(counts[outcome]) for outcome in reversed(WORST_FIRST))
            text += f"| {title.lower()}, {form} | {numbers} |\n"
    return text


def _left_out() -> str:
    reasons: dict[str, list[str]] = {}
    for model_type, reason in left_out().items():
        reasons.setdefault(reason, []).append(model_type)
    text = "\n## Without a row\n\nModel types that have none of these classes.\n\n| why | model types |\n|---|---|\n"
    return text + "".join(f"| {reason} | {', '.join(sorted(types))} |\n" for reason, types in sorted(reasons.items()))
