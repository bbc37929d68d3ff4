"""The two commands: `lightning-sp-train` (Hydra) and `lightning-sp` (Lightning's CLI, `prepare` and `export`).

Both build a model, a DataModule and a Trainer from text and call the Trainer; nothing is decided here.

Lightning's launcher starts the other ranks by running this process's command line again. A single Hydra job may be run
again so, and Lightning hands its folder on. A sweep may not: each child would sweep too. So each job of a sweep is a
process of its own, started with that job's overrides, and what it leaves behind (process group, environment, memory)
ends with it. Under torchrun and SLURM, where every rank is started by others, rank 0 alone has a run folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
import lightning.pytorch as pl
import torch
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from lightning_sp.callbacks import MemoryMonitor, RunReport, ThroughputMonitor
from lightning_sp.checkpoint import export_checkpoint
from lightning_sp.errors import SequenceParallelError, closest
from lightning_sp.text.prepare import prepare

CONFIG_PATH, CONFIG_NAME = "pkg://lightning_sp.conf", "train"
SUMMARY = "summary.json"
# Of a sweep's own overrides: they have no place in the command line of one job.
_SWEEP_OVERRIDE = re.compile(r"[+~]*hydra[./](mode|sweep|sweeper|launcher)\b")


def silence_upstream() -> None:
    """Hide what no user of this package can act upon."""
    # Lightning 2.6 asks torch's pytree in a way that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)", category=FutureWarning)


# lightning-sp-train --------------------------------------------------------------------------------------------------


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
    if report is not None and report.resume_command is None:
        report.resume_command = hydra_resume_command(HydraConfig.get().overrides.task)
    save_config(config)
    trainer.fit(module, datamodule=datamodule, ckpt_path=config.ckpt_path)
    return report.summary.perplexity_after if report is not None and report.summary is not None else None


@rank_zero_only
def save_config(config: DictConfig) -> None:
    """Write the composed configuration, with what was derived from the data, into the run's folder."""
    OmegaConf.save(config, Path(config.run_dir) / "config.yaml", resolve=True)


def program() -> list[str]:
    """Return how this program was started: its name where that is found on the path, else interpreter and file."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return [sys.executable, "-m", main.__spec__.name]
    name = Path(sys.argv[0]).name
    found = shutil.which(name)
    is_same = found is not None and Path(found).resolve() == Path(sys.argv[0]).resolve()
    return [name] if is_same else [sys.executable, os.path.abspath(sys.argv[0])]


def hydra_resume_command(overrides: Sequence[str]) -> str:
    """Return the command that goes on from ``{checkpoint}`` to ``{max_steps}`` with the same overrides."""
    kept = [item for item in overrides if not re.match(r"[+]*(ckpt_path|trainer\.max_steps)=", item)]
    return " ".join([shlex.join([*program(), *kept]), "ckpt_path={checkpoint}", "trainer.max_steps={max_steps}"])


def sweep_job_command() -> list[str]:
    """Return the command line that runs this job of a sweep alone: the flags given, and the job's own overrides."""
    job = HydraConfig.get()
    given = get_args_parser().parse_args(sys.argv[1:])
    flags = [
        argument
        for argument in sys.argv[1:]
        if argument not in given.overrides and argument != "-m" and not argument.startswith("--m")
    ]
    own = [item for item in job.overrides.hydra if not _SWEEP_OVERRIDE.match(item)]
    return [*program(), *flags, *job.overrides.task, *own, f"hydra.run.dir={quoted(job.runtime.output_dir)}"]


def run_sweep_job(command: Sequence[str], folder: Path) -> float | None:
    """Run one job of a sweep in a process of its own and return its last validation perplexity.

    Raises:
        SequenceParallelError: The job failed, or this process is one of several that torchrun or SLURM started.
    """
    if external_rank(os.environ) is not None:
        raise SequenceParallelError(
            "--multirun starts every job itself, but torchrun or SLURM has started this process already: run the sweep "
            "without them (a Hydra launcher such as submitit starts its jobs on a cluster), or one torchrun for each job"
        )
    ended = subprocess.run(list(command), check=False)
    if ended.returncode:
        raise SequenceParallelError(
            f"job {folder.name} of the sweep ended with exit code {ended.returncode}: {shlex.join(command)}"
        )
    summary = folder / SUMMARY
    if not summary.is_file():
        return None
    perplexity: float | None = json.loads(summary.read_text())["perplexity_after"]
    return perplexity


def quoted(value: str) -> str:
    """Return a value as Hydra's grammar reads it back, whatever is in it."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def external_rank(environment: Mapping[str, str]) -> int | None:
    """Return the rank that torchrun or SLURM gave this process, None where Lightning starts the ranks."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return int(environment["RANK"])
    if "SLURM_PROCID" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1:
        return int(environment["SLURM_PROCID"])
    return None


def external_rank_overrides(environment: Mapping[str, str]) -> list[str]:
    """Return the overrides by which ranks other than 0 make no run folder and no log of their own.

    Their clocks may differ, and with them the folder's name. What is written during the fit goes to rank 0's folder.
    """
    if not external_rank(environment):
        return []
    return ["hydra.run.dir=.", "hydra.output_subdir=null"]


def suggest_names(arguments: Sequence[str]) -> Iterator[str]:
    """Yield one line for each override of a key that does not exist, with the nearest that does."""
    try:
        overrides = OverridesParser.create().parse_overrides(get_args_parser().parse_args(list(arguments)).overrides)
    except (HydraException, SystemExit):
        return
    with hydra.initialize_config_module("lightning_sp.conf", version_base="1.3"):
        groups = [
            item.input_line
            for item in overrides
            if item.input_line is not None and "." not in item.key_or_group and not item.is_add()
        ]
        try:
            config = hydra.compose(CONFIG_NAME, overrides=groups, return_hydra_config=True)
        except HydraException:
            config = hydra.compose(CONFIG_NAME, return_hydra_config=True)
    known = list(config_keys(OmegaConf.to_container(config)))
    for item in overrides:
        if not item.is_add() and "." in item.key_or_group and item.key_or_group not in known:
            yield f"{item.key_or_group!r} is no option here{closest(item.key_or_group, known)}"


def config_keys(node: object, prefix: str = "") -> Iterator[str]:
    """Yield every key of a nested mapping, dotted."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield f"{prefix}{name}"
            yield from config_keys(value, f"{prefix}{name}.")


# lightning-sp --------------------------------------------------------------------------------------------------------


class Parser(LightningArgumentParser):
    """Lightning's parser, which names the nearest option when it is given an unknown one."""

    @override
    def error(self, message: str, *arguments: Any, **keywords: Any) -> NoReturn:
        """End with the message and the nearest names."""
        known = list(option_names(self))
        wrong = [word.split("=")[0] for word in message.split() if word.startswith("--")]
        hints = [f"{name}{closest(name, known)}" for name in wrong if name not in known]
        super().error("\n".join([message, *hints]), *arguments, **keywords)


def option_names(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield every option of a parser and of its subcommands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for subcommand in action.choices.values():
                yield from option_names(subcommand)


class CommandLine(LightningCLI):
    """Lightning's CLI with this package's model and data unless others are named."""

    def before_fit(self) -> None:
        """Tell the report how this run is resumed: by the configuration that Lightning saves beside the metrics."""
        for report in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(report, RunReport) and report.resume_command is None:
                fit_again = shlex.join([*program(), "fit", "--config"])
                report.resume_command = (
                    f"{fit_again} {{folder}}/config.yaml --ckpt_path {{checkpoint}} --trainer.max_steps {{max_steps}}"
                )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Set the defaults."""
        parser.set_defaults(
            {
                "model": {
                    "class_path": "lightning_sp.models.CausalLM",
                    "init_args": {"model": {"class_path": "lightning_sp.models.LlamaConfig"}},
                },
                "data": {"class_path": "lightning_sp.data.SequenceShardingDataModule"},
            }
        )


def main() -> None:
    """Run `lightning-sp`: fit, validate, test or predict by Lightning's CLI, prepare token files, or export a checkpoint."""
    silence_upstream()
    if sys.argv[1:2] == ["prepare"]:
        prepare_command(sys.argv[2:])
        return
    if sys.argv[1:2] == ["export"]:
        export_command(sys.argv[2:])
        return
    CommandLine(
        pl.LightningModule,
        pl.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=0,
        parser_class=Parser,
        trainer_defaults={
            "callbacks": [ThroughputMonitor(), MemoryMonitor(), RunReport()],
            "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "runs"}},
        },
        parser_kwargs={
            "description": "Train on long sequences. `lightning-sp prepare` writes token files from text, `lightning-sp export` a checkpoint "
            "as a plain state dict."
        },
    )


def prepare_command(arguments: Sequence[str]) -> None:
    """Run `lightning-sp prepare`."""
    parser = argparse.ArgumentParser(
        "lightning-sp prepare", description="Write a token file (.bin/.idx) from documents."
    )
    parser.add_argument("source", nargs="+", help="text, .jsonl or .parquet files, glob patterns, or 'stdlib'")
    parser.add_argument("--output", required=True, help="the token file's path, without .bin or .idx")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, a tokenizers .json, a Hugging Face folder")
    parser.add_argument("--field", default="text", help="the documents' field in .jsonl and .parquet")
    parser.add_argument("--minimum-bytes", type=int, default=0, help="leave shorter documents out")
    options: Any = parser.parse_args(list(arguments))
    source = options.source[0] if len(options.source) == 1 else options.source
    try:
        written = prepare(
            source,
            options.output,
            tokenizer=options.tokenizer,
            field=options.field,
            minimum_bytes=options.minimum_bytes,
        )
    except SequenceParallelError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(written.describe())


def export_command(arguments: Sequence[str]) -> None:
    """Run `lightning-sp export`."""
    parser = argparse.ArgumentParser(
        "lightning-sp export", description="Write a checkpoint's model as a plain state dict, for the unwrapped model."
    )
    parser.add_argument("checkpoint", help="a checkpoint's folder or file, of any degrees")
    parser.add_argument("output", help="a .pt or .safetensors file")
    parser.add_argument("--prefix", default="", help="the part to keep, its name left out, e.g. 'model.'")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="cast to it; as trained by default")
    options: Any = parser.parse_args(list(arguments))
    dtype = getattr(torch, options.dtype) if options.dtype else None
    try:
        written = export_checkpoint(options.checkpoint, options.output, prefix=options.prefix, dtype=dtype)
    except SequenceParallelError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(f"{written}: {written.stat().st_size} bytes")


if __name__ == "__main__":
    main()
