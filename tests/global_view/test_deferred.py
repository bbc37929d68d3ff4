"""Logits that wait in the global view: losses and gradients are one device's, and no rank makes those of more than a chunk of tokens."""

from __future__ import annotations

import pytest

from tests.global_view import deferred_ranks as ranks

WAITING = [*ranks.WAITING, *ranks.PUBLIC]
NAMES = [*WAITING, *ranks.MADE]


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_losses_and_gradients_are_those_of_logits_that_are_made(pools, ulysses, ring):
    for answers in pools(ulysses * ring).run(ranks.losses, NAMES, 13, ulysses, ring):
        assert not {name: found for name, found in zip(NAMES, answers, strict=True) if isinstance(found, str)}
        found = dict(zip(NAMES, answers, strict=True))
        assert not {name: each for name, each in found.items() if not each["error"] < 1e-10}
        assert not {name: found[name] for name in WAITING if found[name]["tokens"] > ranks.CHUNK}
