"""Jobs of a Hydra sweep (--multirun), each a process of its own.

Lightning's launcher starts the other ranks by running this process's command line again. A single job may be run again so. A sweep may not:
each child would sweep too. So each job is started with that job's overrides, and what it leaves behind (process group, environment,
memory) ends with it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig

from lightning_sp.cli.external_launcher import external_rank
from lightning_sp.cli.program import program
from lightning_sp.errors import SequenceParallelError

SUMMARY = "summary.json"
# Of a sweep's own overrides: they have no place in the command line of one job.
_SWEEP_OVERRIDE = re.compile(r"[+~]*hydra[./](mode|sweep|sweeper|launcher)\b")


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
