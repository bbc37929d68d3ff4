"""The command that resumes a run of Hydra."""

import shlex
import sys

import pytest
from omegaconf import OmegaConf

from lightning_sp import SequenceParallelError
from lightning_sp.cli.hydra_command import fit, hydra_resume_command


def test_resume_command_keeps_the_overrides_and_replaces_the_end(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/lightning-sp-train"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    overrides = ["data.source=[a b]", "trainer.max_steps=5", "ckpt_path=old", "+trainer.max_time=1", "model=gpt_tiny"]
    command = hydra_resume_command(overrides)
    assert shlex.split(command)[-5:] == [
        "data.source=[a b]",
        "+trainer.max_time=1",
        "model=gpt_tiny",
        "ckpt_path={checkpoint}",
        "trainer.max_steps={max_steps}",
    ]


@pytest.mark.parametrize("seed", [-1, "abc", 2**32, True])
def test_a_seed_that_is_none_is_refused_by_name(seed):
    with pytest.raises(SequenceParallelError, match=f"seed={seed!r}: must be a whole number from 0 to 4294967295"):
        fit(OmegaConf.create({"seed": seed}))
