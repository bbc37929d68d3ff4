"""The table of transformers' models: where its rows come from, how small a model is made, what an outcome is, and twenty of its rows."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import time
from importlib.metadata import version

import pytest
import torch

from tools.models.answers import Answers
from tools.models.batches import IGNORED, PADDED, Batches, Trial, forms_of
from tools.models.images import collate
from tools.models.outcome import BEST_FIRST, worst
from tools.models.page import PAGE, Row, page, read_page
from tools.models.ranks import LARGEST_ERROR, compare, reference, sharded
from tools.models.registry import Case, entries, heads, left_out
from tools.models.rules import HEAD_DIM, HEADS, KEY_VALUE_HEADS, VOCABULARY
from tools.models.shrink import tiny_config
from tools.models.user import build
from tools.models.worlds import Worlds, answer, answer_of

# The registries, and with them the page, are of one version.
pytestmark = pytest.mark.skipif(
    f"transformers {version('transformers')} " not in PAGE.read_text(),
    reason="the page is of another version of transformers",
)
# Of each way that a model can be built: decoders, encoders, both, experts, windows, chunks, biases, softcaps, sinks, a tower beside the text;
# and of what is refused (yoso).
SUBSET = {
    "llama": "logits", "gpt2": "own loss", "qwen2_moe": "logits", "qwen3": "own loss", "mixtral": "logits", "gemma2": "logits",
    "gemma4": "own loss", "gpt_oss": "logits", "llama4": "logits", "deepseek_v3": "logits",
    "bert": "logits", "modernbert": "logits", "bart": "own loss", "t5": "logits", "gpt_neo": "logits",
    "deepseek_v32": "logits", "mamba": "logits", "llava": "logits",
    "yoso": "logits", "mpt": "logits",
}  # fmt: skip

# Those that take longest, and those of which another of its kind is in `make test`.
# tests/rewrite/test_gradients.py has GPT-2, Qwen, Gemma 2, GPT-OSS, and tests/flows ModernBERT.
SLOW = (
    "mamba", "t5", "gemma4", "deepseek_v32", "deepseek_v3", "bert", "bart", "llama", "gpt_neo", "llama4", "mixtral",
    "gpt2", "qwen3", "gemma2", "gpt_oss", "modernbert",
)  # fmt: skip

# Two kinds of degrees at once, and each alone, by turns.
DEGREES = dict(zip(SUBSET, itertools.cycle(("2x2", "1x2", "2x1")), strict=False))


@functools.cache
def cases() -> dict[str, Case]:
    return {case.model_type: case for case in entries()}


@functools.cache
def rows() -> dict[tuple[str, str], Row]:
    return {(row.model_type, row.kind): row for row in read_page(PAGE.read_text())}


def test_every_model_type_has_a_row_or_a_reason():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    with_a_row, without = {case.model_type for case in (*entries(), *heads())}, left_out()
    assert not with_a_row & without.keys()
    assert set(CONFIG_MAPPING_NAMES) <= with_a_row | without.keys()
    assert all(without.values())
    assert len(entries()) == len(cases()) > 350


@pytest.mark.parametrize(
    ("model_type", "parts"),
    [
        ("llama", [""]), ("qwen3_moe", [""]), ("deepseek_v3", [""]), ("t5", [""]), ("bart", [""]), ("gemma3", ["text_config", "vision_config"]),
        ("llava", ["text_config", "vision_config"]), ("qwen2_audio", ["text_config", "audio_config"]),
    ],
)  # fmt: skip
def test_a_tiny_configuration_is_small_in_all_its_parts(model_type, parts):
    config = tiny_config(model_type)
    for part in (getattr(config, name) if name else config for name in parts):
        assert part.hidden_size == HEADS * HEAD_DIM
        assert part.num_hidden_layers == 2
        assert part.num_attention_heads == HEADS
    text = config.get_text_config()
    assert text.vocab_size == VOCABULARY
    assert getattr(text, "num_key_value_heads", HEADS) in (HEADS, KEY_VALUE_HEADS)
    tokens = {
        name: value for name, value in vars(config).items() if name.endswith("_token_id") and isinstance(value, int)
    }
    assert all(value < VOCABULARY for value in tokens.values()), tokens
    assert not [n for n, v in vars(text).items() if "drop" in n and isinstance(v, float) and v > 0]


def test_two_special_tokens_beyond_the_vocabulary_stay_two():
    config = tiny_config("qwen2_vl")
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    assert len({getattr(config, name) for name in names}) == len(names)


def test_a_batch_is_padded_on_each_side_and_no_target_is_padding():
    model = build(cases()["llama"])
    for form in forms_of("causal LM"):
        batches = Batches(Trial.of(cases()["llama"], form), model)
        masks = torch.stack([row["attention_mask"] for row in batches]).unflatten(0, (3, 2))
        sides = {("left" if int(mask[1, 0]) == 0 else "right" if int(mask[1, -1]) == 0 else "none") for mask in masks}
        assert sides == set(PADDED)
    own, by_hand = (Batches(Trial.of(cases()["llama"], form), model) for form in ("own loss", "logits"))
    assert all((row["labels"][row["attention_mask"] == 0] == IGNORED).all() for row in own)
    assert all(
        int(t) in (IGNORED, int(i))
        for row in by_hand
        for t, i in zip(row["shift_labels"], row["input_ids"][1:], strict=False)
    )
    assert (own[0].keys() | by_hand[0].keys()) - (own[0].keys() & by_hand[0].keys()) == {"labels", "shift_labels"}


def test_no_row_of_the_page_is_wrong_or_a_crash():
    assert not [row for row in rows().values() if {"wrong", "crash"}.intersection(row.outcomes)]


def test_what_counts_as_exact():
    before = {"a": torch.zeros(3), "b": torch.zeros(2)}
    after = {"a": torch.full((3,), 0.1, dtype=torch.float64), "b": torch.full((2,), 1e-3, dtype=torch.float64)}
    expected = {"before": before, "after": after, "losses": [2.0, 1.0]}
    assert compare(after, [2.0, 1.0], expected)["outcome"] == "exact"
    assert compare({**after, "a": after["a"] + 1e-8}, [2.0, 1.0], expected)["outcome"] == "exact"
    assert compare({**after, "a": after["a"] + 2e-6}, [2.0, 1.0], expected)["outcome"] == "wrong"
    # A tensor that moves little may not hide behind one that moves much.
    assert compare({**after, "b": after["b"] * 1.0015}, [2.0, 1.0], expected)["outcome"] == "wrong"
    assert (
        "b is off by 0.0015 of its update" in compare({**after, "b": after["b"] * 1.0015}, [2.0, 1.0], expected)["why"]
    )
    assert compare(after, [2.0, 1.1], expected)["outcome"] == "wrong"
    assert compare({"a": after["a"]}, [2.0, 1.0], expected)["outcome"] == "wrong"


def test_the_worst_outcome_is_that_of_all():
    answers = [{"outcome": outcome} for outcome in BEST_FIRST]
    assert worst(answers)["outcome"] == "crash"
    assert worst(answers[:3])["outcome"] == "refused"


def test_answers_are_kept_at_once_and_by_the_package(tmp_path):
    file, case = tmp_path / "cache" / "models.json", cases()["bert"]
    Answers(file, "one").add(case, "logits", {"outcome": "exact"})
    assert Answers(file, "one").of(case, "logits") == {"outcome": "exact"}
    assert Answers(file, "one").of(case, "own loss") is None
    assert Answers(file, "two").of(case, "logits") is None
    Answers(file, "two").add(case, "logits", {"outcome": "refused"})
    assert Answers(file, "one").of(case, "logits") == {"outcome": "exact"}


def test_a_page_reads_back_as_it_was_written():
    long = "a reason of many words that is broken over more lines than one because it would not fit a window " * 3
    written = [
        Row(model_type="a", kind="causal LM", class_name="AForCausalLM", outcomes=("exact", "exact"), reasons=()),
        Row(model_type="b", kind="masked LM", class_name="BForMaskedLM", outcomes=("refused", "exact"), reasons=(long.strip(),)),
        Row(
            model_type="b", kind="question answering", class_name="BForQuestionAnswering", outcomes=("crash", "-"),
            reasons=("KeyError: 'x' | y".replace("|", "/"),),
        ),
    ]  # fmt: skip
    text = page(written)
    assert read_page(text) == written
    assert "| Model types, logits | 2 | 0 | 0 | 0 | 0 |" in text
    assert max(len(line) for line in text.splitlines()) <= 120


@pytest.mark.slow
def test_a_model_that_ends_or_stops_its_ranks_loses_no_other():
    with Worlds(limit_s=5.0) as worlds:
        first = worlds(2)
        first.others_s = 0.5  # the other rank never answers
        found = [answer_of(first, fail_on_rank_0), answer_of(worlds(2), fine)]
    assert [each["outcome"] for each in found] == ["crash", "exact"]
    assert found[0]["why"] == "KeyError: 'a name of rank 0'"


@pytest.mark.slow
def test_a_difference_that_float32_makes_is_gone_in_float64(pools, tmp_path):
    """Dory's norms and logits are float32. What is left is its condition: weights that differ in their last bit do as much on one device."""
    trial, file = Trial.of(cases()["dory"], "logits"), str(tmp_path / "reference.pt")
    errors = {}
    for wide in (False, True):
        trial = dataclasses.replace(trial, wide=wide)
        assert answer_of(pools(1), reference, trial, file)["outcome"] == "ran"
        errors[wide] = answer_of(pools(2), sharded, trial, "1x2", file)["error"]
    assert errors[True] < 1e-7 < LARGEST_ERROR < errors[False]


@pytest.mark.parametrize(
    ("model_type", "numbers"), [("llava", [16, 16]), ("qwen2_vl", [4, 8]), ("mistral3", [4, 4]), ("idefics3", [4, 4])]
)
def test_a_row_of_text_and_image_has_a_placeholder_for_each_of_its_tokens(model_type, numbers):
    case = cases()[model_type]
    model = build(case)
    batches = Batches(Trial.of(case, "own loss"), model)
    assert batches.num_images == len(batches) == 6
    placeholders = [int((row["input_ids"] == model.config.image_token_id).sum()) for row in batches.rows]
    assert placeholders == numbers * 3
    tower = [p for name, p in model.named_parameters() if "vis" in name]
    model(**collate(batches.rows[:2])).loss.backward()
    assert any(p.grad is not None and bool(p.grad.any()) for p in tower), "the loss does not depend on the images"


def fail_on_rank_0() -> dict[str, str]:
    if os.environ["RANK"] == "0":
        raise KeyError("a name of rank 0")
    time.sleep(600)  # as one that waits for rank 0
    return fine()


def fine() -> dict[str, str]:
    return {"outcome": "exact"}


@pytest.mark.parametrize(
    "model_type", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in SUBSET]
)
def test_the_page_is_true_of_a_type(pools, model_type):
    case, form = cases()[model_type], SUBSET[model_type]
    row = rows()[model_type, case.kind]
    found = answer(pools, case, form, layouts=[DEGREES[model_type]])
    assert found["outcome"] == row.outcomes[forms_of(case.kind).index(form)], found
