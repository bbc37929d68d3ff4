"""docs/models.md: a row for each model type, one for each head, what refusals say, and the types without a row with the reason.

The page can be read back: a row that is not tried again stays as it was.
"""

from __future__ import annotations

import importlib.metadata
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.models.answers import ROOT, Answers
from tools.models.batches import FORMS, forms_of
from tools.models.outcome import BEST_FIRST
from tools.models.ranks import LARGEST_ERROR, LARGEST_PART
from tools.models.registry import ENTRIES, Case, left_out

PAGE = ROOT / "docs" / "models.md"
# Of those that this page calls refused.
COMMAND = "make models"
HEAD = """# Models of transformers

`{command}` writes this page; `{command} ARGS="bert llama"` renews rows.
It was written with transformers {transformers} and torch {torch}.

Each class is unmodified and has tiny random weights. A plain user's `LightningModule` trains it for three optimizer
steps in float64. Plain Lightning does so on one device. `Trainer(strategy=SequenceParallelStrategy(...))` does so at
Ulysses 2, at ring 2, and at both. Of the three batches one has no padding, one is padded on the right, one on the left.
Image-text and multimodal models are trained on text alone, but where a row says that there was an image in each row of
the batch. [flows.md](flows.md) has more of them, with rows that hold no image.
"own loss" is `self.model(**batch).loss`. "logits" is `F.cross_entropy` of `self.model(...).logits`. Dropout is off.

| outcome | means |
|---|---|
| exact | all three layouts give the weights of one device: to {error:g}, and to {part:g} of what the steps changed |
| refused | a `SequenceParallelError` on all ranks, which the number at the row's end stands for |
| wrong | it trained, and the weights are others |
| crash | another error, or ranks that did not answer |
| not compared | plain Lightning on one device cannot do it either, or not twice alike |

What is exact "in the global view" is refused where the step sees a rank's part alone, and was tried there then, as the
strategy does by default.

A model that casts to float32 itself may differ in its last digits. It is then trained once more, everywhere, with
float64 in place of those casts; the row says so.

"""
TITLES = ("Model types", "Heads")
COLUMNS = ("model type", "kind", "class", *FORMS, "why")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the page says of a case.

    Args:
        outcomes: of each form; "-" where the case has no such form.
        reasons: what the outcomes say, each once.
    """

    model_type: str
    kind: str
    class_name: str
    outcomes: tuple[str, ...]
    reasons: tuple[str, ...]


def write_page(cases: Sequence[Case], answers: Answers, target: Path = PAGE) -> None:
    """Write a page: rows of this version's answers, and of the present page where it has none."""
    before = {(row.model_type, row.kind): row for row in read_page(target.read_text() if target.exists() else "")}
    rows = [_row(case, answers) or before.get((case.model_type, case.kind)) for case in cases]
    target.write_text(page([row for row in rows if row is not None]))


def not_exact() -> list[str]:
    """Return the model types of which the page calls some form not exact."""
    rows = read_page(PAGE.read_text() if PAGE.exists() else "")
    return sorted({row.model_type for row in rows if set(row.outcomes) - {"exact", "-"}})


def exact() -> set[tuple[str, str, str]]:
    """Return what the page calls exact: model type, kind, form."""
    rows = read_page(PAGE.read_text() if PAGE.exists() else "")
    return {
        (r.model_type, r.kind, f) for r in rows for f, said in zip(FORMS, r.outcomes, strict=True) if said == "exact"
    }


def page(rows: Sequence[Row]) -> str:
    """Return the page."""
    counted = Counter(reason for row in rows for reason in row.reasons)
    number = {reason: place for place, (reason, _) in enumerate(counted.most_common(), 1)}
    text = HEAD.format(
        command=COMMAND, transformers=importlib.metadata.version("transformers"), torch=importlib.metadata.version("torch").partition("+")[0],
        error=LARGEST_ERROR, part=LARGEST_PART,
    )  # fmt: skip
    tables = dict(zip(TITLES, _split(rows), strict=True))
    text += _table(["", *BEST_FIRST], [line for title, part in tables.items() for line in _counts(title, part)])
    for title, part in tables.items():
        lines = [
            [row.model_type, row.kind, f"`{row.class_name}`", *row.outcomes, ", ".join(str(number[r]) for r in row.reasons)] for row in part
        ]  # fmt: skip
        text += f"\n## {title}\n\n{_table(COLUMNS, lines)}"
    text += "\n## Why\n\n"
    for reason, place in number.items():
        text += textwrap.fill(f"{place}. {reason}", 118, subsequent_indent="   ", break_long_words=False) + "\n"
    return text + _left_out()


def read_page(text: str) -> list[Row]:
    """Return the rows of a page."""
    why = text.partition("\n## Why\n")[2].partition("\n## ")[0]
    reasons = {n: " ".join(said.split()) for n, said in re.findall(r"^(\d+)\. (.*(?:\n   .*)*)", why, re.MULTILINE)}
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == len(COLUMNS) and cells[2].startswith("`"):
            model_type, kind, class_name, *outcomes, numbers = cells
            said = tuple(reasons[n] for n in numbers.split(", ") if n)
            rows.append(
                Row(
                    model_type=model_type, kind=kind, class_name=class_name.strip("`"), outcomes=tuple(outcomes), reasons=said
                )
            )  # fmt: skip
    return rows


def _row(case: Case, answers: Answers) -> Row | None:
    found = {form: answers.of(case, form) for form in forms_of(case.kind)}
    if any(answer is None for answer in found.values()):
        return None
    known = {form: answer for form, answer in found.items() if answer is not None}
    said = [_brief(answer["why"].replace(case.class_name, "the model")) for answer in known.values() if "why" in answer]
    return Row(
        model_type=case.model_type, kind=case.kind, class_name=case.class_name,
        outcomes=tuple(known[form]["outcome"] if form in known else "-" for form in FORMS), reasons=tuple(dict.fromkeys(said)),
    )  # fmt: skip


def _brief(why: str) -> str:
    """Return a reason without the numbers of one run: of the preflight's its first sentence and its first suspect."""
    why = re.sub(r"/\S*/site-packages/", "", " ".join(why.split()))  # where a package lies
    found = re.match(r"(preflight: .*?)(?: \(allowed|\. ).*?(?:Likely: \(1\) (.*?)(?:: .*?)?; \(2\).*)?$", why)
    return why if found is None else found[1] + (f"; likely {found[2]}" if found[2] else "")


def _split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    return [row for row in rows if row.kind in ENTRIES], [row for row in rows if row.kind not in ENTRIES]


def _counts(title: str, rows: Sequence[Row]) -> list[list[str]]:
    lines = []
    for place, form in enumerate(FORMS):
        counts = Counter(row.outcomes[place] for row in rows)
        lines.append([f"{title}, {form}", *(str(counts[outcome]) for outcome in BEST_FIRST)])
    return lines


def _left_out() -> str:
    reasons: dict[str, list[str]] = {}
    for model_type, reason in left_out().items():
        reasons.setdefault(reason, []).append(model_type)
    text = "\n## Without a row\n\nModel types that have none of these classes, by what they are.\n\n"
    for reason, types in sorted(reasons.items()):
        text += textwrap.fill(f"- {reason}: {', '.join(sorted(types))}", 118, subsequent_indent="  ") + "\n"
    return text


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *lines))
