"""The variables by which a launcher tells a process which rank it is: all there, whole numbers, within their bounds, or the run is refused.

    Lightning's own        LOCAL_RANK, NODE_RANK or GROUP_RANK, where they are set
    torchrun               RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, and GROUP_RANK where it is set
    SLURM                  SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID, SLURM_NTASKS

Lightning reads them one by one and fails in Python's words, and where one is missing it may start ranks that another has started already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lightning_sp.errors import SequenceParallelError

_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OF_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS")
_NODE = ("NODE_RANK", "GROUP_RANK")


def check_variables(environment: Any, variables: Mapping[str, str], *, num_devices: int, num_nodes: int) -> None:
    """Refuse variables that do not say which rank this process is.

    Args:
        environment: Lightning's ClusterEnvironment, chosen by them. Of another kind than the three nothing is known.
        variables: of this process.
        num_devices: ranks of this host, as the Trainer was given them.
        num_nodes: of the Trainer.

    Raises:
        SequenceParallelError: with the variable, its value and its bounds.
    """
    if type(environment) is TorchElasticEnvironment:
        _check_torchrun(variables, num_devices)
        _all_ranks(variables, "WORLD_SIZE", num_devices, num_nodes)
    elif type(environment) is SLURMEnvironment:
        numbers = _numbers(
            variables, _OF_SLURM, "SLURM was chosen for SLURM_NTASKS is set", "start the ranks by srun, or unset it"
        )
        _below(numbers, "SLURM_PROCID", "SLURM_NTASKS")
        _all_ranks(variables, "SLURM_NTASKS", num_devices, num_nodes)
    elif type(environment) is LightningEnvironment:
        _check_lightning(variables, num_nodes)


def _check_torchrun(variables: Mapping[str, str], num_devices: int) -> None:
    why, how = (
        "torchrun has set TORCHELASTIC_RUN_ID",
        "start the script by torchrun, or unset what an earlier one has left",
    )
    optional = [name for name in ("GROUP_RANK",) if name in variables]
    numbers = _numbers(variables, [*_OF_TORCHRUN, *optional], why, how)
    _below(numbers, "RANK", "WORLD_SIZE")
    _below(numbers, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if (started := numbers["LOCAL_WORLD_SIZE"]) != num_devices:
        raise SequenceParallelError(
            f"LOCAL_WORLD_SIZE={started}: torchrun has started {started} ranks on this host, and Trainer(devices=...) has {num_devices}: must "
            f"be as many; give --nproc-per-node={num_devices}, or devices={started}"
        )


def _all_ranks(variables: Mapping[str, str], name: str, num_devices: int, num_nodes: int) -> None:
    """Refuse a Trainer of other ranks than were started: of too few nodes it would keep a world of several on one host's loopback."""
    if (started := int(variables[name])) == num_devices * num_nodes:
        return
    nodes, rest = divmod(started, num_devices)
    fix = f"give num_nodes={nodes}" if not rest else f"start {num_devices} on each of {num_nodes} nodes"
    raise SequenceParallelError(
        f"{name}={started}: so many ranks were started, and Trainer(devices={num_devices}, num_nodes={num_nodes}) has "
        f"{num_devices * num_nodes}: must be as many; {fix}. A script that several numbers of nodes start reads it: torchrun sets "
        "GROUP_WORLD_SIZE, SLURM sets SLURM_NNODES"
    )


def _check_lightning(variables: Mapping[str, str], num_nodes: int) -> None:
    given = [name for name in ("LOCAL_RANK", *_NODE) if name in variables]
    numbers = _numbers(variables, given, "", "unset what an earlier run has left")
    name = next((each for each in _NODE if each in variables), None)
    if name is not None and numbers[name] >= num_nodes:
        raise SequenceParallelError(
            f"{name}={numbers[name]}: num_nodes={num_nodes} has nodes 0 to {num_nodes - 1}; give Trainer(num_nodes=...) all nodes, or unset "
            "what an earlier run has left"
        )
    elsewhere = [each for each in ("RANK", "WORLD_SIZE") if each in variables]
    if num_nodes > 1 and name is None and elsewhere:
        raise SequenceParallelError(
            f"{' and '.join(f'{each}={variables[each]}' for each in elsewhere)} without NODE_RANK, with num_nodes={num_nodes}: every node would "
            "take itself for node 0; set NODE_RANK on each, start the script by torchrun, or, where each rank is a pod of its own, give "
            "Trainer(plugins=KubeflowEnvironment())"
        )


def _numbers(variables: Mapping[str, str], names: Any, why: str, how: str) -> dict[str, int]:
    if missing := [each for each in names if each not in variables]:
        raise SequenceParallelError(f"{', '.join(missing)}: not set, and must be, for {why}; {how}")
    for each in names:
        if not variables[each].strip().isdecimal():
            raise SequenceParallelError(f"{each}={variables[each]!r}: must be a whole number of at least 0; {how}")
    return {each: int(variables[each]) for each in names}


def _below(numbers: Mapping[str, int], rank: str, size: str) -> None:
    if numbers[rank] >= numbers[size]:
        raise SequenceParallelError(
            f"{rank}={numbers[rank]}: must be below {size}={numbers[size]}; unset what an earlier run has left, or start all ranks anew"
        )
