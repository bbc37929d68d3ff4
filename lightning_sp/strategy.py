"""`SequenceParallelStrategy`: Lightning's hooks in the order of the flow, each delegating.

    config -> mesh -> batch sharding -> model rewrite -> attention -> loss -> gradients -> checkpoint

This file alone knows that order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sp import comm
from lightning_sp.config import StrategyConfig
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext
from lightning_sp.data.batch.collective_shard import collective_shard
from lightning_sp.data.batch.contents.without_sequence import describe_whole
from lightning_sp.data.batch.to_device import to_device
from lightning_sp.data.loaders.same_samples import same_samples
from lightning_sp.parallelize import check_added, check_optimized
from lightning_sp.preflight.tried_steps import TriedSteps
from lightning_sp.preflight.views import Views
from lightning_sp.step.auto_checkpointing import AutoCheckpointing
from lightning_sp.step.meshes import attention_mesh, base_mesh
from lightning_sp.step.prepare import lay_out_model
from lightning_sp.step.results.kept_values import KeptValues
from lightning_sp.step.results.predictions import share_predictions
from lightning_sp.step.resume.run_state import RunState
from lightning_sp.step.runner import StepRunner
from lightning_sp.trainer import loops
from lightning_sp.trainer.checkpointing.interrupted_saves import check_interrupted_saves
from lightning_sp.trainer.features import check_precision, check_trainer_features
from lightning_sp.trainer.hooks.batch_hooks import moves_batches, of_user, reads_before_backward
from lightning_sp.trainer.logged_numbers.logged_sums import LoggedSums
from lightning_sp.trainer.logged_numbers.row_metrics import RowMetrics
from lightning_sp.trainer.out_of_memory import explain_out_of_memory
from lightning_sp.trainer.same_options import check_same_options
from lightning_sp.trainer.token_weighted import TokenWeightedStrategy


class SequenceParallelStrategy(TriedSteps, TokenWeightedStrategy):
    """Train transformers on sequences split over devices: ``Trainer(strategy="sequence_parallel", devices=8)``.

    Results are those of a single device, or training does not start. See `config.StrategyConfig` for the options, which are the same
    here, in ``conf/strategy/*.yaml`` and on the Lightning CLI.

    Raises:
        SequenceParallelError: an option, a degree, a model, a batch or a loss that cannot be carried exactly.
    """

    def __init__(
        self,
        sequence_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | Literal["auto"] = "auto",
        ulysses_size: int | Literal["auto"] = "auto",
        ring_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        tensor_parallel_plan: Mapping[str, str] | None = None,
        shard_size: int | Literal["auto"] = "auto",
        reshard_after_forward: bool | Literal["auto"] = "auto",
        prefetch_blocks: int | Literal["auto"] = "auto",
        cpu_offload: bool = False,
        gather_dtype: str = "float32",
        gradient_dtype: str = "auto",
        sync_each_batch: bool | Literal["auto"] = "auto",
        fp8: bool | Literal["emulated"] = False,
        optimizer_in_backward: bool = False,
        kernel: str = "auto",
        ring_transport: str = "auto",
        ring_saves_kv: bool = False,
        ring_method: str = "auto",
        ulysses_stages: int = 1,
        loss_chunk_tokens: int | Literal["auto"] | None = "auto",
        activation_checkpointing: bool | str = "auto",
        memory_budget_gib: float | Literal["auto"] = "auto",
        mlp_tile_tokens: int | Literal["auto", "as_needed"] | None = "as_needed",
        stage_inputs: str = "saved",
        activation_offload: str = "auto",
        activation_loading_horizon: int = 4,
        offload_folder: str | None = None,
        delayed_init: bool = True,
        compile: bool = False,
        preflight: bool = True,
        preflight_tokens: int | Literal["auto"] = "auto",
        global_view: bool | Literal["auto"] = "auto",
        shard_batch: bool = True,
        sequence_dims: dict[str, int] | None = None,
        labels_shifted: bool | None = None,
        packed_documents: bool | None = None,
        balance: str = "auto",
        save_distributed_checkpoint: bool = True,
        asynchronous_checkpoints: bool | Literal["auto"] = "auto",
        exclude_frozen_parameters: bool = False,
        timeout_s: float = 300.0,
        start_timeout_s: float = 1800.0,
        hang_s: float | Literal["auto"] = "auto",
        preemption_limit_s: float = 300.0,
        preemption_exit_code: int = 143,
        process_group_backend: str | None = None,
        **unknown: Any,
    ) -> None:
        config = StrategyConfig.from_signature(locals(), unknown)
        super().__init__(process_group_backend=process_group_backend, config=config)
        self._again: Callable[[], Any] = lambda: None  # the micro-batch in progress, once more
        self._run, self._row_metrics, self._sums = RunState(), RowMetrics(), LoggedSums()
        self._checkpointing = AutoCheckpointing(self.config)

    # ---- mesh

    @override
    def setup_environment(self) -> None:
        Strategy.setup_environment(self)
        self._is_laid_out = False
        check_precision(str(self.precision_plugin.precision))
        check_trainer_features(self._module.trainer, self._module, self.config)
        self._averages.defer(self._module.trainer)
        # Before any hook: one may ask how many steps there will be, for which Lightning makes the loaders.
        self._let_loaders_through(self._module.trainer)
        self._setup_distributed()
        if self._device_mesh is None:
            loops.forget_loaders(self._module.trainer)
            self._device_mesh = base_mesh(self.config, self.root_device, self.world_size)
            self._host_groups = comm.host_groups(
                self._device_mesh.get_group("sequence_parallel"), self._start_timeout, self.config.tensor_parallel_size
            )
        check_same_options(self._module.trainer, self.config, self._groups.world)
        self._module._device_mesh = self.device_mesh

    # ---- model

    @override
    def setup(self, trainer: Trainer) -> None:
        self._lay_out(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        # Batches of a test have the names of the fit before it, which the preflight has compared.
        anew = fitting or self._is_new
        self._show(whole=self._views.sees_whole(loops.evaluated_step(trainer)), anew=anew)
        self._follow_hooks(trainer)
        self.barrier()
        self._steps.start_run()
        self._first_evaluations.expect(sharded=self.sequence_parallel_size > 1)
        if fitting:
            self._start_windows(self._steps.context, refuses=self.sequence_parallel_size > 1)
            self._steps.context.forget_sums()
            self.setup_optimizers(trainer)
            check_interrupted_saves(trainer, self._groups.world)
            self._to_try.expect(self.config.preflight and self.world_size > 1, trainer.global_step)
        self.setup_precision_plugin()
        self._run.start(trainer, self.sequence_mesh, self._groups.world, fitting=fitting)

    @override
    def _prepare(self, module: LightningModule) -> bool:
        """Split the degrees by the model's heads, and lay it out over the ranks, once for a model; return whether this was it."""
        if self._prepared is module:
            return False
        self._mesh = attention_mesh(module, self.config, self.device_mesh, self.root_device, self.ranks_per_node)
        self._batch = None  # of another model, perhaps in another layout
        self._views = Views(whole=self.config.global_view is True)
        context = SequenceContext(self._mesh, self.config.attention, global_view=self._views.whole)
        self._runner = StepRunner(module, context, groups=self._groups, device=self.root_device, read_ahead=reads_before_backward)  # fmt: skip
        self.model = self.precision_plugin.convert_module(module)
        lay_out_model(module, self.config, self._mesh, self.root_device, self._groups.world)
        self._checkpointing = AutoCheckpointing(self.config)
        self._prepared = module
        return True

    # ---- batch

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Give all ranks of a sequence the same samples, from the resumed position on."""
        if self._host_groups is None:  # asked for its length before a run, which makes it anew
            return dataloader
        training = self._module.trainer.training
        loader = same_samples(
            dataloader,
            self._data_coordinates,
            training=training,
            accumulation=self._accumulate,
            seed=int(os.environ.get("PL_GLOBAL_SEED", 0)),
            by_hand=not self.config.shard_batch,
            own_samplers=bool(self._own_samplers),
        )
        if training:
            self._run.cursor.resume_loader(loader)
        return loader

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        trainer = self._module.trainer
        self._show_as_known()
        self._evaluated.advance(trainer, dataloader_idx)
        local = self._carried(partial(self._sharded, batch))
        if self._info.is_whole and self.sequence_parallel_size > 1:
            self._log_once.warn(describe_whole(batch, self.sequence_parallel_size), topic="whole")
        else:
            self._offer(batch)
            evaluated = loops.evaluated_step(trainer), dataloader_idx
            self._first_evaluations.offer(batch, evaluated, self._info, begins=self._evaluated.begins)
        self._before_hooks()
        local = self._handed.note(self._moved(local, self._info, device, dataloader_idx))
        if self._info.balance is not None:
            self._log_once(self._info.balance.describe(), topic="balance")
        return local

    @override
    def _sharded(self, batch: Any) -> Any:
        trainer, by_hand, told = self._module.trainer, not self.config.shard_batch, self._sigterm.is_told
        most, new = self._checkpointing.most_tokens, self._to_try.is_new
        loop, written = {"what comes next": "a batch", **loops.decided_by(trainer)}, self._run.written
        shard = partial(collective_shard, by_hand=by_hand, ends=told, loop=loop, written=written, is_new=new)
        mesh, options, changed = self.zigzag_mesh, self._options(batch), self._run.have_changed(trainer, batch)
        changed |= self._first_evaluations.is_of_new_kind(loops.evaluated_step(trainer), batch)
        shard = partial(shard, is_changed=changed, is_filler=self._evaluated.is_filler(trainer) or self._was_filler)
        local, info, agreed = shard(batch, mesh, options, self._groups.world, most_tokens=most)
        self._run.buffers.share_after(agreed, self._steps.context.moved_buffers, **loops.of_batch(trainer))
        self._sigterm.agree(trainer, agreed.of_any.ends)
        seed = self._run.streams.alike(str(trainer.state.stage), trainer.global_step, mesh)
        local, info = to_device(local, info, self.root_device, alone=moves_batches(trainer))
        self._batch = replace(info, seed=seed)
        return local

    @override
    def _moved(self, local: Any, info: SequenceInfo, *where: Any) -> Any:
        with self._draws_alike(info):
            return super().batch_to_device(self._steps.shown(local, info), *where)

    # ---- preflight

    @override
    def _trial_options(self) -> dict[str, Any]:
        return loops.trial_options(self, self._run.schedules.take_numbers)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        check_optimized(self._module, self.optimizers)
        check_added(self._module)
        self._run.compare_ranks(self._module, self.sequence_mesh, self._shard_size, self._groups.world)
        self._preflight(batch, batch_idx, self._run.schedules)

    # ---- steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._batch is not None
        args = self._handed.of_step(args)
        self._follow_metrics()
        trainer, rows, mesh = self._module.trainer, self._batch.rows, self.sequence_mesh
        self._checkpointing.before_step(self._steps, self._batch, self.optimizers, self.ranks_per_node)
        self._batch = replace(self._batch, dropout=self._run.begin_micro_batch(rows, trainer, mesh, self.root_device))
        # A step may take entries out of its batch.
        self._again = partial(self._training_step_again, *map(copy, args), **kwargs)
        kept = KeptValues(self._module, trains=True) if self._steps.context.keeps_in_training else None
        output = self._steps.train(self._batch, lambda: self._counted_step(Strategy.training_step, *args, **kwargs))
        self._steps.check_sums()
        if kept is not None and not self.sees_whole_sequences:
            whole = partial(self._whole_output, of="training_step keeps")
            self._steps.context.keeps_in_training = kept.replace_or_leave(whole)
        if output is None or not self._module.automatic_optimization or loops.skips_backward(trainer):
            self._steps.end_without_backward()
        return output

    def _training_step_again(self, *args: Any, **kwargs: Any) -> Any:
        with loops.without_loggers(self._module.trainer):
            return self._counted_step(Strategy.training_step, *args, **kwargs)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._again = lambda: None
        self._say_what_was_not_compared()
        self._run.end_fit(self._module, self.sequence_mesh, self._groups.world)
        self._steps.end_fit()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(Strategy.validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(Strategy.test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._whole_output(self._evaluate(Strategy.predict_step, *args, **kwargs), "predict_step returns")

    @override
    def on_predict_end(self) -> None:
        """Give every rank the predictions of all samples, in the order of the dataset, each once."""
        super().on_predict_end()
        share_predictions(self._module.trainer.predict_loop, self.sequence_mesh, self._groups.world)

    @override
    def _follow_metrics(self, *, anew: bool = False) -> None:
        mesh, holders = self.sequence_mesh, [self._module, *of_user(self._module.trainer)]
        alike = self._info.is_whole or self.sees_whole_sequences
        self._row_metrics.follow(holders, mesh.data_group if alike else mesh.token_group, anew=anew)

    def _evaluate(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._compare_evaluation(run, *args)
        self._follow_metrics()
        self._of_fillers.begin(self._module)
        kept = KeptValues(self._module) if self._first_evaluations.keeps(run.__name__) else None
        args = self._handed.of_step(args)
        output = self._steps.evaluate(self._info, lambda: self._counted_step(run, *args, **kwargs))
        self._compare_new_kinds(output, kept, run, *args)
        if kept is not None:
            kept.replace(partial(self._whole_output, of=f"{run.__name__} keeps"))
        return output

    # ---- gradients

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        step = self._steps.context.loss_step
        if not self._module.automatic_optimization:
            closure_loss = self._of_counted_groups(self._steps.before_backward(closure_loss), step)
        elif step is not None:
            closure_loss = self._weighed(closure_loss, step)
        if loops.is_update(self._module.trainer):
            module, clipping, world = self._module, loops.clipping(self._module.trainer), self._groups.world
            self._run.update.tell(self.optimizers, module.trainer.global_step, world, root=module, clipping=clipping)

        def may_step() -> bool:  # units, in the backward: not where the weights are still to explain a loss
            self._run.update.check(self._groups.world)
            return not self._steps.is_to_explain

        with nullcontext() if self._in_backward is None else self._in_backward.during_backward(may_step):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._module.automatic_optimization:
            self._steps.end_backward(self._again)
            self._follow_operations()
        self._run.end_backward(self._groups.world)

    # ---- checkpoint

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        self._together(partial(self._save_checkpoint, checkpoint, filepath, storage_options))

    def _save_checkpoint(self, checkpoint: dict[str, Any], *where: Any) -> None:
        comm.come_together()
        self._run.store(
            checkpoint, self._module, self._module.trainer, self.sequence_mesh,
            shard_size=self._shard_size, group=self._groups.world,
        )  # fmt: skip
        super().save_checkpoint(checkpoint, *where)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if (trainer := self._module.trainer).state.fn == TrainerFn.FITTING:
            self._run.resume_data(checkpoint, trainer, dp_size=self.data_parallel_size)
        self._averages.fit_state(checkpoint, self._module)
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._run.resume_streams(checkpoint, self._module.trainer, self.sequence_mesh)

    # ---- end

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        explain_out_of_memory(exception, self._module, self.config, self._mesh, self._batch, self._shard_size)

    @override
    def teardown(self) -> None:
        self._interceptions.close()
        self._release_hooks()
        if self._runner is not None:  # else the module may have no Trainer yet
            self._runner.close()
            self._row_metrics.release([self._module, *of_user(self._module.trainer)])
        self._run.end()
        self._averages.release()
        super().teardown()
