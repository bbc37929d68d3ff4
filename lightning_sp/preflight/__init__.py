"""Before the first step: the user's own training_step on a crop, once whole and once sharded, loss and every gradient compared."""

from lightning_sp.preflight.agreement import Agreement, run_preflight
from lightning_sp.preflight.traceless import traceless
from lightning_sp.preflight.trainer_features import check_trainer_features

__all__ = ["Agreement", "check_trainer_features", "run_preflight", "traceless"]
