"""`lightning-sp-train`: compose conf/train.yaml with the command line's overrides by Hydra, and fit."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
import lightning.pytorch as pl
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_original_cwd, instantiate
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from lightning_sp.callbacks import RunReport
from lightning_sp.cli.external_launcher import external_rank_overrides
from lightning_sp.cli.program import CONFIG_NAME, CONFIG_PATH, program, silence_upstream
from lightning_sp.cli.suggest_names import suggest_names
from lightning_sp.cli.sweep import run_sweep_job, sweep_job_command
from lightning_sp.errors import SequenceParallelError


def train() -> None:
    """Run `lightning-sp-train`: compose conf/train.yaml with the command line's overrides, and fit."""
    silence_upstream()
    arguments = sys.argv[1:]
    sys.argv[1:] = [*arguments, *external_rank_overrides(os.environ)]
    try:
        _train_job()
    except SystemExit as ended:
        if ended.code:
            for line in suggest_names(arguments):
                print(line, file=sys.stderr)
        raise


@hydra.main(version_base="1.3", config_path=CONFIG_PATH, config_name=CONFIG_NAME)
def _train_job(config: DictConfig) -> float | None:
    job = HydraConfig.get()
    if job.mode == RunMode.MULTIRUN and job.launcher._target_.endswith(".BasicLauncher"):
        return run_sweep_job(sweep_job_command(), Path(job.runtime.output_dir))
    return fit(config)


def fit(config: DictConfig) -> float | None:
    """Train what a composed configuration describes; return the last validation perplexity (a sweep's objective)."""
    if isinstance(config.seed, bool) or not isinstance(config.seed, int) or not 0 <= config.seed < 2**32:
        raise SequenceParallelError(f"seed={config.seed!r}: must be a whole number from 0 to {2**32 - 1}")
    pl.seed_everything(config.seed, workers=True)
    datamodule = instantiate(config.data, _convert_="all")
    if config.vocab_size is None:
        config.vocab_size = datamodule.vocab_size
    module = instantiate(config.model, _convert_="all")
    callbacks = [instantiate(callback, _convert_="all") for callback in config.callbacks.values() if callback]
    trainer = instantiate(
        config.trainer, callbacks=callbacks, strategy=instantiate(config.strategy, _convert_="all"), _convert_="all"
    )
    report = next((callback for callback in callbacks if isinstance(callback, RunReport)), None)
    if report is not None:
        report.start_folder = get_original_cwd()  # with hydra.job.chdir the process has left it
        report.resume_command = report.resume_command or hydra_resume_command(HydraConfig.get().overrides.task)
    save_config(config)
    trainer.fit(module, datamodule=datamodule, ckpt_path=config.ckpt_path)
    return report.summary.perplexity_after if report is not None and report.summary is not None else None


@rank_zero_only
def save_config(config: DictConfig) -> None:
    """Write the composed configuration, with what was derived from the data, into the run's folder."""
    folder = Path(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, folder / "config.yaml", resolve=True)


def hydra_resume_command(overrides: Sequence[str]) -> str:
    """Return the command that goes on from ``{checkpoint}`` to ``{max_steps}`` with the same overrides."""
    repeated = [item for item in overrides if not re.match(r"[+]*(ckpt_path|trainer\.max_steps)=", item)]
    return " ".join([shlex.join([*program(), *repeated]), "ckpt_path={checkpoint}", "trainer.max_steps={max_steps}"])
