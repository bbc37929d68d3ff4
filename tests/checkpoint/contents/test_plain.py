"""What a checkpoint holds beside tensors becomes plain containers, or is refused by name."""

from __future__ import annotations

import enum
from pathlib import Path

import numpy as np
from torch.distributed.checkpoint.api import CheckpointException

from lightning_sp.checkpoint.contents.plain import plain_checkpoint
from lightning_sp.checkpoint.folders.folder import first_failure


class Colour(str, enum.Enum):
    RED = "red"


def test_values_become_plain():
    held = {"a": {1, 2}, "b": (Path("x/y"), [np.float64(0.5)]), "c": Colour.RED, "d": np.int64(3), "e": dict}
    plain, refused, described = plain_checkpoint({"mine": held, "hparams_type": dict})
    assert refused == ["mine['e'] is builtins.type"]
    assert described == []
    assert list(plain) == ["mine"], "OmegaConf's class is left out"
    found = plain["mine"]
    assert found["a"] == {1, 2}
    assert found["b"] == ("x/y", [0.5])
    assert [type(found["c"]), type(found["d"]), type(found["b"][1][0])] == [str, int, float]
    assert found["c"] == "red"


def test_hyperparameters_that_are_not_plain_are_described():
    plain, refused, described = plain_checkpoint({"hyper_parameters": {"activation": np.tanh}})
    assert refused == []
    assert described == ["hyper_parameters['activation'] is numpy.ufunc"]
    assert "tanh" in plain["hyper_parameters"]["activation"]


def test_the_first_ranks_failure_is_shown():
    failures = {3: (OSError("full"), None), 1: (ValueError("odd"), None)}
    assert first_failure(CheckpointException("save", failures)) == "rank 1: ValueError: odd"
    assert first_failure(OSError("full")) == "OSError: full"
