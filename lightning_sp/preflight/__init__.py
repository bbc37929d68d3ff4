"""Before the first step: the user's own training_step on a crop, once whole and once sharded, loss and every gradient compared."""

from lightning_sp.preflight.agreement import Agreement, run_preflight
from lightning_sp.preflight.traceless import traceless

__all__ = ["Agreement", "run_preflight", "traceless"]
