"""Planted faults in models: the preflight catches each, names its cause, and raises no false alarm."""

from __future__ import annotations

import re

import pytest

from tests.preflight import fault_ranks as ranks

BY_HAND, SHIFT, POSITIONS = (
    "attention that lightning_sp did not see",
    "a shift along the sequence",
    "positions made inside the model",
)
STATISTICS, NORM = "statistics over this rank's tokens alone", "a normalisation over the sequence"
# fault -> the cause that must be named first
CAUSES = {
    "convolution": "a convolution along the sequence", "causal convolution": "a convolution along the sequence",
    "gru": "a recurrence along the sequence", "lstm": "a recurrence along the sequence",
    "batch norm": STATISTICS, "instance norm": STATISTICS,
    "layer norm over tokens": NORM, "normalised over tokens": NORM, "deviation over tokens": NORM,
    "mean": "a mean, sum or maximum over the sequence", "maximum": "a mean, sum or maximum over the sequence",
    "pooling": "pooling over this rank's tokens alone",
    "attention by hand": BY_HAND, "linear attention": BY_HAND, "softmax over tokens": BY_HAND,
    "cumulative sum": "a cumulative sum along the sequence",
    "roll": SHIFT, "token shift": SHIFT, "padded shift": SHIFT,
    "first token": "one token of the sequence taken by its index", "last token": "one token of the sequence taken by its index",
    "counted positions": POSITIONS, "table of positions": POSITIONS, "positions in the step": POSITIONS,
    "length": "a number made of the length", "temperature": "a number made of the length", "divided by tokens": "a number made of the length",
    "sort": "a choice among the tokens", "best tokens": "a choice among the tokens",
    "fourier": "a Fourier transform", "flip": "a turn of the sequence", "router": "router statistics",
    "placed": "a tower's tokens placed", "mask": "an attention whose mask is not the sequence's",
    "rolled labels": "labels shifted inside the model", "padded labels": "labels shifted inside the model",
    "hook": "a gradient that is changed on its way", "backward": "a gradient that is changed on its way",
    "noise": "draws random numbers: randn_like", "dropout by name": "draws random numbers: dropout",
}  # fmt: skip
# Others of the same cause, which a ring alone runs, among the slow tests.
VARIANTS = {
    "causal convolution", "lstm", "instance norm", "normalised over tokens", "linear attention", "padded shift", "positions in the step",
    "divided by tokens", "padded labels", "dropout by name",
}  # fmt: skip


# Of each cause the first.
FIRST = {cause: name for name, cause in reversed(CAUSES.items())}
FEW = [name for name in CAUSES if name in FIRST.values() and name not in VARIANTS]


def held(pools, names):
    """Assert that each is refused for its cause, and return what was said by name."""
    found = pools(2).run(ranks.verdicts, names, "64-true", {"ulysses_size": 2})
    assert found[0] == found[1], "ranks refuse together"
    said = dict(zip(names, found[0], strict=True))
    missed = {name for name, each in said.items() if not each.startswith("preflight: ")}
    assert not missed, missed
    wrong = {name: each for name, each in said.items() if CAUSES[name] not in each.partition("(2)")[0]}
    assert not wrong, wrong
    return said


def test_a_fault_of_each_cause_is_caught_and_it_is_named(pools):
    said = held(pools, FEW)
    assert len(FEW) >= 20
    convolution = said["convolution"]
    assert "first in the model's order: model.embedding.weight, model.positions.weight, model.qkv.weight" in convolution
    assert "model.part.layers.0 (Conv1d), conv1d (handed the whole's result there, the losses agree)" in convolution


@pytest.mark.slow
def test_each_fault_is_caught_and_its_cause_is_named(pools):
    names = [name for name in CAUSES if name not in VARIANTS]
    said = held(pools, names)
    assert len(names) >= 30
    settled = [name for name, each in said.items() if "the losses agree)" in each]
    assert len(settled) >= 21, sorted(set(names) - set(settled))


# Where a loss, or what it is made of, is of a shard: the refusal's two lines, run by a step, are exact.
LINES = {
    "rolled labels": "import shift; loss = F.cross_entropy(logits.flatten(0, 1), shift(input_ids, 1, -100).flatten())",
    "divergence": "loss = batch_mean(sequence_sum(F.kl_div(log_p, q, reduction='none').sum(-1)), of='rows')",
    "divergence of tokens": "loss = batch_mean(F.kl_div(log_p, q, reduction='none').sum(-1), mask)",
    "squared error": "loss = batch_mean(F.mse_loss(output, target, reduction='none'), mask)",
    "mean by hand": "import batch_mean; loss = batch_mean(each, mask)",
    "mean": "import sequence_mean; pooled = sequence_mean(x, mask)",
    "maximum": "import sequence_max; pooled = sequence_max(x, mask)",
    "normalised over tokens": "import sequence_sum; x = x / sequence_sum(x.square()).sqrt()[:, None]",
    "last token": "import last_token; pooled = last_token(x, mask)",
    "length": "import sequence_sum; length = sequence_sum(torch.ones_like(input_ids))[0]",
}
SHOWN = re.compile(
    r"Two lines make it exact: (from lightning_sp\.reductions import [^;]+; [^;]+?)(?:; \(2\)|\. Training|$)"
)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [{"ulysses_size": 2}, {"ring_size": 2}])
def test_the_two_lines_of_a_refused_loss_make_it_exact(pools, strategy):
    found = pools(2).run(ranks.verdicts, list(LINES), "64-true", strategy)[0]
    shown = {}
    for (name, line), said in zip(LINES.items(), found, strict=True):
        _, _, causes = said.partition("Found on the crop: ")
        assert line in causes.partition("(2)")[0], (name, said)
        shown[name] = SHOWN.search(causes)[1]
    for name, said in zip(shown, pools(2).run(ranks.followed, list(shown.items()), strategy)[0], strict=True):
        assert not said, (name, shown[name], said)


# Turned chunk by chunk, a zigzag is the turned sequence.
EXACT_ON_A_RING = ("flip",)


@pytest.mark.slow
def test_on_a_ring_each_fault_is_caught_and_its_cause_is_named(pools):
    names = list(CAUSES)
    found = dict(zip(names, pools(2).run(ranks.verdicts, names, "64-true", {"ring_size": 2})[0], strict=True))
    assert tuple(name for name, said in found.items() if not said) == EXACT_ON_A_RING
    assert not {name: said for name, said in found.items() if said and CAUSES[name] not in said.partition("(2)")[0]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "strategy"),
    [
        ("32-true", {"ulysses_size": 2}),
        ("bf16-mixed", {"ring_size": 2}),
    ],
)
def test_in_other_precisions_faults_are_caught_and_what_is_fine_passes(pools, precision, strategy):
    names = ["fine", "gru", "mean", "roll", "batch norm", "counted positions"]
    fine, *faulty = pools(2).run(ranks.verdicts, names, precision, strategy)[0]
    assert not fine
    for name, said in zip(names[1:], faulty, strict=True):
        assert CAUSES[name] in said, (name, said)
