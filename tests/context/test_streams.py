"""The global random streams begin from a seed and are put back."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import torch

from lightning_sp.context.streams import mixed_seed, streams, streams_from

CPU = torch.device("cpu")


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_what_is_drawn_follows_the_seed_and_leaves_the_own_streams():
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    with streams(CPU):
        expected = drawn()
    with streams_from(mixed_seed(1, 2), CPU):
        first = drawn()
    with suppress(ValueError), streams_from(mixed_seed(1, 2), CPU):
        assert drawn() == first
        raise ValueError
    with streams_from(mixed_seed(2, 1), CPU):
        assert not {*drawn()} & {*first}
    with streams_from(None, CPU):
        assert drawn() == expected
