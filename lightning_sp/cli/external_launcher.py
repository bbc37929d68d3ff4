"""Ranks that torchrun or SLURM started, and not Lightning: rank 0 alone has a run folder then."""

from __future__ import annotations

from collections.abc import Mapping


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
