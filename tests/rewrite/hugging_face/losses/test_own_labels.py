"""A model's own loss of labels that a step makes, drops some of or shifts by itself: that of one device."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from lightning_sp import SequenceParallelError
from lightning_sp.rewrite.hugging_face.losses.given_labels import targets_of
from lightning_sp.testing import max_error
from tests.rewrite.hugging_face.losses import own_labels_ranks as ranks

DEGREES = {"ring": {"ring_size": 2}, "ulysses": {"ulysses_size": 2}, "groups": {"data_parallel_size": 2}}
SLOW = (("every kind", "ulysses"), ("shifted", "ring"), ("late", "ulysses"), ("audio", "groups"))


@pytest.mark.parametrize(
    ("case", "degrees"),
    [
        ("every kind", "ring"),
        ("every kind", "groups"),
        ("audio", "ring"),
        ("decoder", "ring"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW),
    ],
)
def test_each_is_that_of_one_device(pools, case, degrees):
    groups = 2 if degrees == "groups" else 1
    [plain] = pools(1).run(ranks.fit, 1, None, case, groups)
    for found in pools(2).run(ranks.fit, 2, {**DEGREES[degrees], "preflight": case == "late"}, case, groups):
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-10)
        if groups == 1:
            assert found["valid"] == pytest.approx(plain["valid"], rel=1e-10)
        for name, weight in plain["weights"].items():
            assert max_error(found["weights"][name], weight) < 1e-10, name


def test_labels_of_other_tokens_are_refused():
    context = SimpleNamespace(step=SimpleNamespace(batch=SimpleNamespace(names=("labels",), rows=2)), local_length=8)
    told = re.escape("labels (2, 3), where this rank has 8 tokens of each of 2 rows")
    with pytest.raises(SequenceParallelError, match=told):
        targets_of(context, torch.zeros(2, 3, dtype=torch.int64), torch.device("cpu"))
