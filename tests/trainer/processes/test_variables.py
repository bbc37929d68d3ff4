"""Variables of launchers that are missing, no numbers or out of bounds are refused by name, before a rank is started."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

from lightning_sp import SequenceParallelError, SequenceParallelStrategy
from lightning_sp.trainer.processes.variables import check_variables

TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
SLURM = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_NTASKS": "2"}


@pytest.mark.parametrize(
    ("environment", "variables", "num_nodes", "said"),
    [
        (LightningEnvironment, {"NODE_RANK": "abc"}, 1, "NODE_RANK='abc': must be a whole number of at least 0; unset "),
        (LightningEnvironment, {"LOCAL_RANK": "-1"}, 1, "LOCAL_RANK='-1': must be a whole number"),
        (LightningEnvironment, {"NODE_RANK": "1"}, 1, "NODE_RANK=1: num_nodes=1 has nodes 0 to 0; give Trainer(num_nodes="),
        (LightningEnvironment, {"GROUP_RANK": "2"}, 2, "GROUP_RANK=2: num_nodes=2 has nodes 0 to 1; "),
        (LightningEnvironment, {"RANK": "1", "WORLD_SIZE": "2"}, 2, "RANK=1 and WORLD_SIZE=2 without NODE_RANK, with num_nodes=2: every node"),
        (TorchElasticEnvironment, {"WORLD_SIZE": "2"}, 1, "RANK, LOCAL_RANK, LOCAL_WORLD_SIZE: not set, and must be, for torchrun has set "),
        (TorchElasticEnvironment, {**TORCHRUN, "RANK": "x"}, 1, "RANK='x': must be a whole number of at least 0; start the script by torchrun"),
        (TorchElasticEnvironment, {**TORCHRUN, "RANK": "2"}, 1, "RANK=2: must be below WORLD_SIZE=2; "),
        (TorchElasticEnvironment, {**TORCHRUN, "LOCAL_RANK": "2"}, 1, "LOCAL_RANK=2: must be below LOCAL_WORLD_SIZE=2; "),
        (TorchElasticEnvironment, {**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, 1, "LOCAL_WORLD_SIZE=4: torchrun has started 4 ranks on this host"),
        (TorchElasticEnvironment, TORCHRUN, 2, "WORLD_SIZE=2: so many ranks were started, and Trainer(devices=2, num_nodes=2) has 4"),
        (SLURMEnvironment, {**SLURM, "SLURM_NTASKS": "4"}, 1, "SLURM_NTASKS=4: so many ranks were started, and Trainer(devices=2, num_node"),
        (SLURMEnvironment, {"SLURM_NTASKS": "2"}, 1, "SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID: not set, and must be, for SLURM was chosen"),
        (SLURMEnvironment, {**SLURM, "SLURM_PROCID": "3"}, 1, "SLURM_PROCID=3: must be below SLURM_NTASKS=2; "),
    ],
)  # fmt: skip
def test_variables_that_do_not_say_a_rank_are_refused(environment, variables, num_nodes, said):
    with pytest.raises(SequenceParallelError) as refused:
        check_variables(environment(), variables, num_devices=2, num_nodes=num_nodes)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("environment", "variables", "num_nodes"),
    [
        (LightningEnvironment, {}, 1),
        (LightningEnvironment, {"RANK": "0", "WORLD_SIZE": "8"}, 1),  # left by another run, and read by nobody
        (LightningEnvironment, {"LOCAL_RANK": "1", "NODE_RANK": "1", "GROUP_RANK": "0"}, 2),
        (TorchElasticEnvironment, TORCHRUN, 1),
        (TorchElasticEnvironment, {**TORCHRUN, "WORLD_SIZE": "4", "GROUP_RANK": "1"}, 2),
        (SLURMEnvironment, SLURM, 1),
    ],
)
def test_variables_that_do_are_not(environment, variables, num_nodes):
    check_variables(environment(), variables, num_devices=2, num_nodes=num_nodes)


def test_they_are_read_where_the_trainer_is_made(monkeypatch):
    monkeypatch.setenv("NODE_RANK", "abc")
    with pytest.raises(SequenceParallelError, match=r"^NODE_RANK='abc'"):
        pl.Trainer(strategy=SequenceParallelStrategy(), accelerator="cpu", devices=2, logger=False)


def test_a_trainer_of_one_node_in_a_world_of_two_is_refused():
    with pytest.raises(
        SequenceParallelError, match=r"^WORLD_SIZE=4: .* num_nodes=1\) has 2: must be as many; give num_nodes=2\."
    ):
        check_variables(TorchElasticEnvironment(), {**TORCHRUN, "WORLD_SIZE": "4"}, num_devices=2, num_nodes=1)
