"""FSDP2 over every rank, and what it is given so that any model's step may run on it: its units, gradients, outputs and collectives."""

from lightning_sp.parallelize.fsdp.abandoned_forward import abandon_forward, drop_accumulated
from lightning_sp.parallelize.fsdp.added_parameters import check_added
from lightning_sp.parallelize.fsdp.dtensor.behind_runs import watch_behind_runs
from lightning_sp.parallelize.fsdp.dtensor.outside_gradients import forget_reads, is_read_outside
from lightning_sp.parallelize.fsdp.dtensor.plain_operands import LearnsOutsideError, as_torch_does
from lightning_sp.parallelize.fsdp.dtensor.sharded_tensors import num_writes, used_as_whole
from lightning_sp.parallelize.fsdp.freed_behind_runs import freed_behind_run
from lightning_sp.parallelize.fsdp.gathers.checked_gathers import failing_together
from lightning_sp.parallelize.fsdp.gathers.watched_gathers import watched_behind_run
from lightning_sp.parallelize.fsdp.inner_backward import gathering_again, gradients_of_weights, without_reduction
from lightning_sp.parallelize.fsdp.parameter_attributes import share_attributes
from lightning_sp.parallelize.fsdp.parameter_dtypes import cast_as_in_forward
from lightning_sp.parallelize.fsdp.parameter_groups import (
    is_freed_after_forward,
    sharded_parameter,
    told_before_freed,
    whole_parameters,
)
from lightning_sp.parallelize.fsdp.shard_model import (
    ParameterLayout,
    accumulating,
    check_layout,
    check_unsharded,
    make_fsdp_root,
    parameter_layout,
    reduce_dtypes,
    remember_layout,
    reshard,
    run_with_whole_parameters,
    shard_model,
)
from lightning_sp.parallelize.fsdp.units.optional_units import gathered, optional_units
from lightning_sp.parallelize.fsdp.units.own_optimizers import refuses_own_steps
from lightning_sp.parallelize.fsdp.units.root_unit import RootUnit, write_counts
from lightning_sp.parallelize.fsdp.unused_parameters import used_parameters

__all__ = [
    "LearnsOutsideError",
    "ParameterLayout",
    "RootUnit",
    "abandon_forward",
    "accumulating",
    "as_torch_does",
    "cast_as_in_forward",
    "check_added",
    "check_layout",
    "check_unsharded",
    "drop_accumulated",
    "failing_together",
    "forget_reads",
    "freed_behind_run",
    "gathered",
    "gathering_again",
    "gradients_of_weights",
    "is_freed_after_forward",
    "is_read_outside",
    "make_fsdp_root",
    "num_writes",
    "optional_units",
    "parameter_layout",
    "reduce_dtypes",
    "refuses_own_steps",
    "remember_layout",
    "reshard",
    "run_with_whole_parameters",
    "shard_model",
    "sharded_parameter",
    "share_attributes",
    "told_before_freed",
    "used_as_whole",
    "used_parameters",
    "watch_behind_runs",
    "watched_behind_run",
    "whole_parameters",
    "without_reduction",
    "write_counts",
]
