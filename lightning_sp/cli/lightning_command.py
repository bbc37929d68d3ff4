"""`lightning-sp`: fit, validate, test and predict by Lightning's CLI, and the commands `prepare` and `export`."""

from __future__ import annotations

import argparse
import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NoReturn

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

from lightning_sp.callbacks import MemoryMonitor, RunReport, ThroughputMonitor
from lightning_sp.cli.export_command import export_command
from lightning_sp.cli.prepare_command import prepare_command
from lightning_sp.cli.program import program, silence_upstream
from lightning_sp.errors import closest


class Parser(LightningArgumentParser):
    """Lightning's parser, which names the nearest option when it is given an unknown one."""

    @override
    def error(self, message: str, *arguments: Any, **keywords: Any) -> NoReturn:
        """End with the message and the nearest names."""
        known = list(option_names(self))
        wrong = [word.split("=")[0] for word in message.split() if word.startswith("--")]
        hints = [f"{name}{closest(name, known)}" for name in wrong if name not in known]
        super().error("\n".join([message, *hints, *_nearest_of_classes(message)]), *arguments, **keywords)


def _nearest_of_classes(message: str) -> Iterator[str]:
    """Yield the nearest names to those that jsonargparse says a class, or a module, does not have."""
    for path, option in re.findall(r"given class_path '([\w.]+)':\s+Option '(\w+)' is not accepted", message):
        module, _, name = path.rpartition(".")
        yield f"{option}{closest(option, inspect.signature(getattr(import_module(module), name)).parameters)}"
    for module, name in re.findall(r"module '([\w.]+)' has no attribute '(\w+)'", message):
        yield f"{name}{closest(name, dir(import_module(module)))}"


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
