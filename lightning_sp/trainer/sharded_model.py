"""`ShardedModelStrategy`: the part of a Lightning strategy about a model whose parameters FSDP2 shards over a device mesh.

Owns initial weights, accumulation without communication, state dicts, checkpoints, and which ranks read different samples.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sp import comm
from lightning_sp.checkpoint import (
    check_adapted,
    check_optimizers,
    exclude_frozen,
    exclude_quantized,
    is_built_noted,
    load_checkpoint,
    load_model_state,
    load_optimizer_state,
    loads_by_own_rules,
    located,
    model_state,
    optimizer_state,
    save_checkpoint,
    whole_state_dict,
)
from lightning_sp.config import StrategyConfig, resolve_degrees
from lightning_sp.data.loaders.coordinates import DataCoordinates
from lightning_sp.errors import SequenceParallelError, told_error
from lightning_sp.parallelize import (
    MetaDevice,
    abandon_forward,
    accumulating,
    recorded,
    reshard,
    take_over_checkpointing,
    undistributed,
    watch_behind_runs,
)
from lightning_sp.trainer.checkpointing.asynchronous_checkpoints import AsynchronousCheckpoints
from lightning_sp.trainer.features import given_checkpoint_io
from lightning_sp.trainer.hooks.hook_reads import reader_of_paths
from lightning_sp.trainer.log_once import LogOnce
from lightning_sp.trainer.logged_numbers.agreed_numbers import watch_numbers
from lightning_sp.trainer.loops import forbid_inference_mode
from lightning_sp.trainer.optimizers.finetuning import restore_finetuning
from lightning_sp.trainer.optimizers.optimizer_in_backward import OptimizerInBackward, step_in_backward
from lightning_sp.trainer.optimizers.weight_averaging import WeightAverages
from lightning_sp.trainer.optimizers.whole_steps import step_whole_where_needed
from lightning_sp.trainer.processes.counted_ranks import CountedRanks
from lightning_sp.trainer.processes.preemption import save_when_preempted, set_exit_code, superseded
from lightning_sp.trainer.processes.process_strategy import ProcessStrategy
from lightning_sp.trainer.processes.sigterm import Sigterm
from lightning_sp.trainer.processes.time_limit import Limit


class ShardedModelStrategy(CountedRanks, ProcessStrategy):
    """A LightningModule sharded over a mesh that has an axis ``data_parallel``. Lightning asks a strategy for these hooks."""

    def __init__(self, *, process_group_backend: str | None, config: StrategyConfig) -> None:
        limits = timedelta(seconds=config.start_timeout_s), timedelta(seconds=config.timeout_s)
        super().__init__(
            process_group_backend=process_group_backend,
            timeouts=limits,
            hang_s=config.warns_after_s,
            host_shards=config.cpu_offload,
        )
        self.config = config
        self._log_once = LogOnce()
        self._averages = WeightAverages()
        self._sigterm = Sigterm()
        self._later = AsynchronousCheckpoints(config, self._log_once)
        self._in_backward: OptimizerInBackward | None = None
        self._after_saves: list[Callable[[Trainer], None]] = []
        self._is_laid_out = self._is_new = False  # the model, for the run in progress; and for the first time
        self._device_mesh: DeviceMesh | None = None
        self._host_groups: comm.HostGroups | None = None

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _groups(self) -> comm.HostGroups:
        assert self._host_groups is not None
        return self._host_groups

    @property
    def _accumulate(self) -> int:
        return int(self._module.trainer.accumulate_grad_batches)

    # ---- mesh

    @property
    def device_mesh(self) -> DeviceMesh:
        """Return the mesh data_parallel x sequence_parallel x tensor_parallel."""
        if self._device_mesh is None:
            raise SequenceParallelError(
                "the device mesh is not known before the processes have joined; ask for it in setup, configure_model or later"
            )
        return self._device_mesh

    @property
    def data_parallel_rank(self) -> int:
        """Return which samples this rank reads: what to split an iterable dataset by. Known before a run, too, from launch on."""
        if self._device_mesh is None:  # it is the mesh's outermost axis
            return self.global_rank * self.data_parallel_size // self.world_size
        return int(self._device_mesh.get_local_rank("data_parallel"))

    @property
    def data_parallel_size(self) -> int:
        """Return how many groups of ranks read different samples. Known before a run, too."""
        if self._device_mesh is None:
            return resolve_degrees(self.config, self.world_size).data_parallel_size if self.cluster_environment else 1
        return int(self._device_mesh["data_parallel"].size())

    @property
    def data_parallel_group(self) -> ProcessGroup:
        """Return the ranks that read different samples: the `process_group` of a metric of samples, computed from whole sequences.

        Metrics of tokens, computed from shards, need none: they are reduced over the world.
        """
        return self.device_mesh.get_group("data_parallel")

    @property
    def _data_coordinates(self) -> DataCoordinates:
        return DataCoordinates(
            dp_rank=self.data_parallel_rank,
            dp_size=self.data_parallel_size,
            sequence_group=self._groups.samples,
            control_group=self._groups.world,
        )

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    # ---- parameters

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # Rank 0 draws the initial weights as a single process would; the others receive their shards, and none has the whole.
        elsewhere = self.global_rank != 0 if empty_init is None else empty_init
        delayed = (
            self.config.delayed_init and empty_init is None and self._host_groups is not None and self.world_size > 1
        )
        precise = nullcontext() if self._averages.are_of_float32 else self.precision_plugin.tensor_init_context()
        recorder = recorded(self._module, draws=not elsewhere) if delayed else nullcontext()
        with undistributed(), recorder, MetaDevice() if elsewhere else nullcontext(), precise:
            yield

    @override
    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Let what fails in one rank's `configure_model` fail on all: the others would wait for it.

        Communicates: one all_reduce of 8 bytes.
        """
        try:
            yield
        except Exception as error:
            with suppress(SequenceParallelError):
                comm.agree(f"configure_model failed: {told_error(error)}", self._groups.world)
            raise
        comm.agree(None, self._groups.world)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate; Lightning enters this for all but a window's last micro-batch."""
        with accumulating(self._module, whole=self.config.accumulates_whole):
            yield

    @abstractmethod
    def _prepare(self, module: LightningModule) -> bool:
        """Lay a model over the ranks, once; return whether this was it."""

    def _lay_out(self, trainer: Trainer) -> None:
        """Lay the run's model over the ranks: where its checkpoint is read, which Lightning does before `setup`, else there.

        Hooks from `configure_optimizers` on then find what was restored, as on one device.
        """
        if self._is_laid_out:
            return
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._prepare_trainer(trainer)
        abandon_forward(self._module)
        self._averages.note_dtypes(self._module)
        self._is_new = self._prepare(self._module)
        self._averages.copy(self._module, trainer)
        self._is_laid_out = True

    # ---- state

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's sharded state, by the user's names."""
        # After an evaluation forward the root stays gathered.
        reshard(self._module)
        return model_state(self._module)

    def whole_state_dict(self, module: nn.Module | None = None) -> dict[str, Tensor]:
        """Return a module's whole tensors in rank 0's host memory, an empty dict on the others. Every rank must call it.

        What `save_pretrained(folder, state_dict=...)` takes, or `load_state_dict` of a model without the strategy.

        Args:
            module: the LightningModule, where it is None, or a part of it.
        """
        reshard(self._module)
        asked = self._module if module is None else module
        return self._together(partial(whole_state_dict, asked, keep=self.is_global_zero))

    @override
    def _setup_distributed(self) -> None:
        self._sigterm.begin(self._limit_when_told(), self.launcher, is_script_child=self.is_script_child)
        super()._setup_distributed()

    def _limit_when_told(self) -> Limit:
        config = self.config
        return Limit(within_s=config.preemption_limit_s, code=config.preemption_exit_code, at=self._progress)

    def _prepare_trainer(self, trainer: Trainer) -> None:
        """Change of a Trainer what a run on shards needs: no inference mode, what ranks compare and agree on."""
        forbid_inference_mode(trainer)
        self._sigterm.follow(trainer, self._limit_when_told())
        save_when_preempted(trainer, self._sigterm)
        self._later.follow(trainer, lambda: self._groups.world, reader=reader_of_paths(trainer))
        watch_numbers(trainer, self._groups)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        restore_finetuning(trainer, self._module)
        step_whole_where_needed(self.optimizers, self._groups.world)
        if self.config.optimizer_in_backward:
            self._in_backward = step_in_backward(self.optimizers, self._module, self.root_device, self._groups.world)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        take_over_checkpointing(self._module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's sharded state, by the user's parameter names."""
        reshard(self._module)
        return optimizer_state(self._module, getattr(optimizer, "optimizer", optimizer))

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self._module
        if is_overridden("on_load_checkpoint", module) and not loads_by_own_rules(module):
            check_adapted(str(module.trainer.ckpt_path), checkpoint, module, strict=strict)
        load_model_state(module, checkpoint["state_dict"], strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        check_optimizers(str(self._module.trainer.ckpt_path), checkpoint, len(self.optimizers))
        for index, (optimizer, state) in enumerate(zip(self.optimizers, checkpoint["optimizer_states"], strict=True)):
            load_optimizer_state(self._module, optimizer, state, index=index)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        io, group = given_checkpoint_io(self), self._groups.world
        exclude_quantized(checkpoint, self._module)
        if self.config.exclude_frozen_parameters:
            self._exclude_frozen(checkpoint)
        path = self._path_of_rank_0(filepath, storage_options if io is None else None)
        as_folder, per_node = self.config.save_distributed_checkpoint, self.ranks_per_node
        if io is None and isinstance(path, str):
            io = self.checkpoint_io  # Lightning's own writes and reads through fsspec
        write = None if io is None else partial(io.save_checkpoint, storage_options=storage_options)
        later = self._later.next_save(checkpoint, path, self._module.trainer, ranks_per_node=per_node, group=group)
        if described := save_checkpoint(checkpoint, path, as_folder=as_folder, write=write, later=later, group=group):
            self._log_once(
                f"hyperparameters that are no plain values are stored as text: {'; '.join(described)}", topic="text"
            )
        trainer = self._module.trainer
        if trainer.state.fn == TrainerFn.FITTING and (older := superseded(trainer, path, checkpoint)) is not None:
            self.remove_checkpoint(older)
        for act in self._after_saves:
            self._when_complete(partial(act, trainer))

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint, if one that is to stand for it is on its way when that is complete."""
        self._when_complete(partial(super().remove_checkpoint, filepath))

    def _when_complete(self, act: Callable[[], None]) -> None:
        if not self._later.act_after(act):
            act()

    def call_after_saves(self, act: Callable[[Trainer], None]) -> None:
        """Call a function on each rank whenever a checkpoint is complete, maybe in a thread beside the training; once for each save."""
        if act not in self._after_saves:
            self._after_saves.append(act)

    def _exclude_frozen(self, checkpoint: dict[str, Any]) -> None:
        if is_built_noted(self._module):
            exclude_frozen(checkpoint, self._module, self._groups.world)
            return
        self._log_once(
            "exclude_frozen_parameters=True leaves nothing out: an earlier Trainer of this process sharded the module without it, so what was "
            "built is not known; give it to the first Trainer too",
            topic="frozen",
        )

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        module, io = self._module, given_checkpoint_io(self)
        self._lay_out(module.trainer)
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        self._later.wait(self._groups.world)  # it may be the one to be loaded
        reshard(module)
        path = self._path_of_rank_0(checkpoint_path)
        if io is None and isinstance(path, str):
            io = self.checkpoint_io
        return load_checkpoint(
            path,
            module,
            with_optimizers=fitting,
            strict=module.strict_loading,
            adapted=is_overridden("on_load_checkpoint", module) or loads_by_own_rules(module),
            weights_only=weights_only,
            read=None if io is None else io.load_checkpoint,
            group=self._groups.world,
        )

    def _path_of_rank_0(self, path: str | os.PathLike[str], storage_options: Any = None) -> Path | str:
        """Return where all ranks read or write a checkpoint, an address as it is. Communicates: one broadcast of the path."""
        if storage_options is not None:
            raise SequenceParallelError(
                f"storage_options={storage_options!r} are not supported: they would count for the save and not for a load; give them to fsspec, "
                "which opens addresses (s3://...), in its configuration or environment: FSSPEC_S3_ENDPOINT_URL=... for endpoint_url"
            )
        place = located(self.broadcast(os.fspath(path)))
        return place.absolute() if isinstance(place, Path) else place

    # ---- end

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._later.wait(self._groups.world)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._later.settle(exception)
        self._sigterm.is_told = False
        set_exit_code(exception, self.config.preemption_exit_code, is_script_child=self.is_script_child)

    @override
    def teardown(self) -> None:
        self._sigterm.stop()
        self._later.settle()
        if self._in_backward is not None:
            self._in_backward.uninstall()
            self._in_backward = None
        watch_behind_runs(self._together)
        super().teardown()
