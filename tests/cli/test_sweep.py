"""A sweep's jobs: their command, their end, and where they cannot start."""

import sys

import hydra
import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import open_dict

from lightning_sp.cli.sweep import SUMMARY, quoted, run_sweep_job, sweep_job_command
from lightning_sp.errors import SequenceParallelError


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A sweep's job with these overrides, as Hydra would describe it to the task."""

    def described(*overrides, argv=()):
        with hydra.initialize_config_module("lightning_sp.conf", version_base="1.3"):
            config = hydra.compose("train", overrides=list(overrides), return_hydra_config=True)
        with open_dict(config):
            config.hydra.runtime.output_dir = str(tmp_path / "it's 3")
            config.hydra.overrides.task = [item for item in overrides if not item.startswith("hydra")]
            config.hydra.overrides.hydra = ["hydra.mode=MULTIRUN", *(o for o in overrides if o.startswith("hydra"))]
        monkeypatch.setattr(HydraConfig.instance(), "cfg", config)
        monkeypatch.setattr(sys, "argv", ["/somewhere/lightning-sp-train", *argv])
        monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)

    return described


def test_a_sweeps_job_is_run_alone(job, tmp_path):
    """Its command has the job's overrides and folder, the flags given, and nothing that would sweep again."""
    job(
        "seed=2",
        "trainer.max_steps=3",
        "hydra.sweep.dir=x",
        "hydra.verbose=true",
        argv=[
            "-m",
            "--config-dir",
            "mine",
            "seed=1,2",
            "trainer.max_steps=3",
            "hydra.sweep.dir=x",
            "hydra.verbose=true",
        ],
    )
    command = sweep_job_command()
    at = command.index("--config-dir")
    assert command[at + 1] == "mine"
    assert command[at + 2 : -1] == ["seed=2", "trainer.max_steps=3", "hydra.verbose=true"]
    (parsed,) = OverridesParser.create().parse_overrides(command[-1:])
    assert (parsed.key_or_group, parsed.value()) == ("hydra.run.dir", str(tmp_path / "it's 3"))
    assert not any("MULTIRUN" in word or word in ("-m", "--multirun") for word in command)


@pytest.mark.parametrize("value", ["a b", "it's", "a=b,c", "\\", "x{y}"])
def test_quoted_values_are_read_back(value):
    (parsed,) = OverridesParser.create().parse_overrides([f"key={quoted(value)}"])
    assert parsed.value() == value


def test_a_failed_job_of_a_sweep_is_named(tmp_path, monkeypatch):
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "-c", "import sys; sys.exit(3)"]
    with pytest.raises(SequenceParallelError, match=f"job {tmp_path.name} .* exit code 3: .*sys.exit"):
        run_sweep_job(command, tmp_path)
    assert run_sweep_job([sys.executable, "-c", ""], tmp_path) is None
    (tmp_path / SUMMARY).write_text('{"perplexity_after": 12.5}')
    assert run_sweep_job([sys.executable, "-c", ""], tmp_path) == 12.5


def test_a_sweep_under_torchrun_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SequenceParallelError, match="--multirun starts every job itself"):
        run_sweep_job([sys.executable, "-c", ""], tmp_path)
