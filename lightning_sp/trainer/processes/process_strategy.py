"""`ProcessStrategy`: the part of a Lightning strategy that is about processes alone: launch, ranks, process group, host-level collectives.

Lightning's own ModelParallelStrategy does the same, but the Trainer refuses precision 64-true for objects of that class, its mesh names and
its `setup` are fixed, and its integer means are rounded down (Lightning issue 21838). Nothing of sequence parallelism is here.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.nodes import ranks_per_node
from lightning_sp.trainer.processes.joining import check_local_rank, how_started, while_joining
from lightning_sp.trainer.processes.launchers import ExternalLauncher, ScriptLauncher, run
from lightning_sp.trainer.processes.parent import STARTED_BY, ParentWatch, run_of
from lightning_sp.trainer.processes.script_end import tell_end_at_exit
from lightning_sp.trainer.processes.variables import check_variables

T = TypeVar("T")


class ProcessStrategy(ParallelStrategy):
    """One process per device under Lightning's own cluster environments (script launcher, torchrun, SLURM, ...)."""

    # Lightning reads it of strategies it does not know: without it there is neither a sampler nor sync_dist.
    is_distributed = True

    def __init__(
        self,
        *,
        process_group_backend: str | None,
        timeouts: tuple[timedelta, timedelta],
        hang_s: float,
        host_shards: bool = False,
    ) -> None:
        """Make a strategy.

        Args:
            process_group_backend: None for that of the device.
            timeouts: time limits of collectives, before the first batch of a run and from it on.
            hang_s: after how long a rank that others wait for is named.
            host_shards: the host's tensors travel too.
        """
        super().__init__()
        self._process_group_backend, self._host_shards = process_group_backend, host_shards
        self._start_timeout, self._timeout = timeouts
        self._hang_s = hang_s
        self._starting = True
        self.num_nodes = 1
        self._parent, self._loopback = ParentWatch(), comm.LoopbackOfRun()
        self._own_samplers: bool | None = None  # known when the first run is set up

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        check_local_rank(self.local_rank, len(self.parallel_devices))
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Return the number of processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def ranks_per_node(self) -> int:
        """Return the number of ranks on this node, as the launcher tells it."""
        return ranks_per_node(self.world_size, num_nodes=self.num_nodes, environment=os.environ)

    @property
    def process_group_backend(self) -> str | None:
        """Return the backend given, or the one chosen for the device."""
        return self._process_group_backend

    @property
    def is_script_child(self) -> bool:
        """Whether another rank's script has started this one."""
        return STARTED_BY in os.environ and self.local_rank != 0

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self.cluster_environment.creates_processes_externally:
            self._launcher = ExternalLauncher()
        else:
            self._launcher = ScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes, late_s=self._timeout.total_seconds()
            )

    def _setup_distributed(self) -> None:
        """Join the world; a second call finds it joined.

        Random streams stay as they are, as on one device; Lightning's own strategies go back to the seed here.
        """
        self.set_world_ranks()
        self._parent.start(os.environ)
        self._stay_on_host()
        if not faulthandler.is_enabled():
            # A crash in native code, gloo's for messages of two sizes say, then shows the lines it came from, as under torchrun. A notebook's
            # stderr is no file.
            with suppress(AttributeError, OSError, RuntimeError, ValueError):
                faulthandler.enable()
        self._process_group_backend = self._get_process_group_backend()
        if self._host_shards and "cpu:" not in self._process_group_backend:
            raise SequenceParallelError(
                f"cpu_offload=True with process_group_backend={self._process_group_backend!r}: norms of shards in the host's memory are "
                f"added up there; give {self._default_backend()!r}, or None"
            )
        assert self.cluster_environment is not None
        device = self.root_device if self.root_device.type != "cpu" else None
        if not _distributed_is_initialized():
            gone = self.launcher.ended if isinstance(self.launcher, ScriptLauncher) else str
            how = self._how_started()
            with while_joining(how, rank=self.global_rank, size=self.world_size, gone=gone) as met_in:
                met_in(store := self._store())
                _init_dist_connection(
                    self.cluster_environment,
                    self._process_group_backend,
                    timeout=self._start_timeout,
                    device_id=device,
                    store=store,
                )
            comm.own_timeouts()
        comm.set_timeouts(self._start_timeout)
        self._starting = True
        self._watch(self._progress)
        tell_end_at_exit()

    def _stay_on_host(self) -> None:
        """Keep sockets on the loopback where all ranks are of this host."""
        if self.num_nodes == 1:
            self._loopback.start()

    def _watch(self, at: Callable[[], str]) -> None:
        limit_s = self._timeout.total_seconds() if comm.has_own_timeouts() else float("inf")
        comm.watch_run(hang_s=self._hang_s, limit_s=limit_s, at=at, last=self._kill_stopped)

    def _together(self, function: Callable[[], T]) -> T:
        """Do what all ranks do together, in a run or outside of one: there it is watched as a run is, and a rank that has ended is named."""
        if comm.is_watched():
            return function()
        self._parent.start(os.environ)
        self._stay_on_host()
        self._watch(lambda: "a call of all ranks behind the run")
        try:
            return cast(T, run(function))
        finally:
            comm.end_run()
            self._loopback.stop()
            self._parent.stop()

    def _kill_stopped(self) -> None:
        """Kill the ranks that this process has started and that are stopped, before it ends: they would stay."""
        if isinstance(self.launcher, ScriptLauncher):
            self.launcher.kill_stopped()

    def _store(self) -> Any:
        """Return the store that all ranks have met in."""
        assert self.cluster_environment is not None
        rank, size, limit = self.global_rank, self.world_size, self._start_timeout
        if (store := comm.fresh_store(rank, size, limit)) is not None:
            return store
        comm.check_port()
        at = self.cluster_environment.main_address, self.cluster_environment.main_port
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = at[0], str(at[1])  # as Lightning does a moment later
        return comm.joined_store(rank, size, limit, at=at, run=run_of(os.environ))

    def _how_started(self) -> str:
        return how_started(
            self.cluster_environment,
            by_script=isinstance(self.launcher, ScriptLauncher),
            num_nodes=self.num_nodes,
            num_processes=self.num_processes,
            variables=os.environ,
        )

    def _progress(self) -> str:
        """Return the stage and the step that this rank is in."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        stage, batch = trainer.state.stage, trainer.fit_loop.epoch_loop.batch_idx
        what = f"{stage.value if stage is not None else trainer.state.fn}, step {trainer.global_step}"
        return f"{what}, batch {batch}" if batch >= 0 else what

    def _get_process_group_backend(self) -> str:
        """Return the backend given, or that of the device: Lightning's own strategies have this method, and theirs who adapt them."""
        return self._process_group_backend or self._default_backend()

    def _default_backend(self) -> str:
        own = str(_get_default_process_group_backend_for_device(self.root_device))
        return f"cpu:gloo,{self.root_device.type}:{own}" if self._host_shards else own

    def set_world_ranks(self) -> None:
        """Tell the environment, and Lightning's rank-zero helpers, which rank this is."""
        if self.cluster_environment is not None:
            check_variables(
                self.cluster_environment, os.environ, num_devices=self.num_processes, num_nodes=self.num_nodes
            )
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        # Lightning reads this attribute of the function.
        rank_zero_only.rank = utils_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        # All loops pass here. The first batch ends the start: what was loaded or restored for it is there on all ranks.
        if self._starting:
            self._starting = False
            comm.set_timeouts(self._timeout)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        # Parameters may have been sharded since the last fit: optimizers of those are no longer valid.
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def _let_loaders_through(self, trainer: Trainer) -> None:
        """Remember `Trainer(use_distributed_sampler=False)`, and keep Lightning from wrapping samplers before we see the loaders."""
        if self._own_samplers is None:
            self._own_samplers = not trainer._accelerator_connector.use_distributed_sampler
        trainer._accelerator_connector.use_distributed_sampler = False

    @override
    def barrier(self, name: str | None = None) -> None:
        if not _distributed_is_initialized():
            return
        comm.barrier(self.root_device)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if not _distributed_is_initialized():
            return obj
        return cast(T, comm.broadcast_object(obj, None, src))

    @override
    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if not tensor.is_floating_point() and str(reduce_op).lower() in ("mean", "avg"):
            tensor = tensor.float()
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Leave the registry alone: `registration` owns our place in it."""

    @override
    def teardown(self) -> None:
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self._parent.stop()
        self._loopback.stop()
        comm.end_run()
        # The sharded model stays where it is: a later fit or evaluation goes on with it.
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
