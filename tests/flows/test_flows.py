"""What users do around a model: docs/flows.md has a row for each script, and says what comes of it."""

from __future__ import annotations

import re

import pytest

from tools.flows.page import PAGE, Row, page, read_page, row_of
from tools.flows.registry import flows
from tools.flows.worlds import answer

pytest.importorskip("datasets")
pytest.importorskip("torchdata")
pytest.importorskip("trl")

FLOWS = {flow.name: flow for flow in flows()}
# Each flow that must notice a planted fault.
SUBSET = (
    "adversarial", "target_network", "hidden_states", "bart_classes", "modernbert_mean",
    "ema_in_validation", "qwen3_vl_images", "idefics_images",
    "kept_for_the_end", "accuracy_from_zero", "questions_and_passages",
    "ema_before_zero_grad", "rate_by_tokens", "antecedents", "internvl_few_words", "single_numbers",
    "multiple_choice", "vilt_questions", "detr_boxes", "as_many_tags_as_tokens",
)  # fmt: skip
# Where it takes two groups that read their own rows: two ranks of a sequence go on in the global view where a part is wrong. Of the others two
# ranks show what a flow does.
OF_GROUPS = ("questions_and_passages", "vilt_questions", "bart_classes", "modernbert_mean", "qwen3_vl_images")
ALL = ["ulysses 2", "ring 2", "data 2 x ring 2"]


def test_every_script_has_a_row_and_every_row_a_script():
    rows = read_page(PAGE.read_text())
    assert [(row.topic, row.name, row.what) for row in rows] == [(f.topic, f.name, f.title) for f in flows()]
    assert len(rows) == len(FLOWS) >= 50


def test_no_row_is_wrong_or_a_crash():
    assert {row.outcome for row in read_page(PAGE.read_text())} <= {"exact", "refused"}


def test_a_page_reads_back_as_it_was_written():
    why = "a reason of many words that is broken over more lines than one because it would not fit a window " * 3
    rows = [
        Row(topic="data", name="one", what="What one does", outcome="exact"),
        Row(topic="trainer", name="two", what="What two does", outcome="refused", why=why.strip()),
    ]
    assert read_page(page(rows)) == rows
    assert max(len(line) for line in page(rows).splitlines() if not line.startswith("|")) <= 120


@pytest.mark.parametrize(
    "name", [name if name in SUBSET else pytest.param(name, marks=pytest.mark.slow) for name in FLOWS]
)
def test_the_page_is_true_of_a_flow(pools, name):
    hold_the_page(pools, name, ["data 2 x ring 2" if name in OF_GROUPS else "ring 2"] if name in SUBSET else ALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBSET)
def test_the_page_is_true_of_a_flow_in_every_layout(pools, name):
    hold_the_page(pools, name, ALL)


def hold_the_page(pools, name, layouts):
    flow = FLOWS[name]
    (row,) = (row for row in read_page(PAGE.read_text()) if row.name == name)
    found = answer(pools, flow, layouts)
    assert found["outcome"] == row.outcome, found
    # Numbers of rows are those of the layout.
    assert re.sub(r"\d+", "n", row_of(flow, found).why)[:40] == re.sub(r"\d+", "n", row.why)[:40]
