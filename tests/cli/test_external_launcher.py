"""Ranks that torchrun or Slurm started."""

import pytest

from lightning_sp.cli.external_launcher import external_rank, external_rank_overrides


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, None),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, None),  # a child of Lightning's launcher: it was told its folder
        ({"RANK": "1", "WORLD_SIZE": "2"}, 1),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, 3),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
    ],
)
def test_ranks_that_others_started_make_no_folder_of_their_own(environment, rank):
    assert external_rank(environment) == rank
    overrides = external_rank_overrides(environment)
    assert overrides == (["hydra.run.dir=.", "hydra.output_subdir=null"] if rank else [])
