"""`SequenceParallelStrategy`: Lightning's hooks in the order of the flow, each delegating.

    config -> mesh -> batch sharding -> model rewrite -> attention -> loss -> gradients -> checkpoint

This file alone knows that order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sp.checkpoint import (
    load_checkpoint,
    load_model_state,
    load_optimizer_state,
    local_path,
    model_state,
    optimizer_state,
    save_checkpoint,
)
from lightning_sp.config import StrategyConfig, resolve_degrees, resolve_shard_size, resolve_split
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext
from lightning_sp.data.batch.collective_shard import collective_shard
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.data.batch.sharding import unshard
from lightning_sp.data.datamodule import SequenceShardingDataModule
from lightning_sp.data.loaders.coordinates import DataCoordinates
from lightning_sp.data.loaders.replace_sampler import is_filler_batch
from lightning_sp.data.loaders.same_samples import same_samples
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout
from lightning_sp.loss.interception import CrossEntropyInterception
from lightning_sp.loss.token_weighting import TokenWindow
from lightning_sp.mesh import SequenceMesh, build_device_mesh, build_fsdp_mesh, check_ring_transport
from lightning_sp.parallelize import (
    check_same_gradients,
    check_unsharded,
    checkpoint_blocks,
    materialize_meta,
    receive_weights,
    reshard,
    shard_model,
    start_root,
    tied_parameters,
    transformer_blocks,
    whole_state,
    without_gradient_sync,
)
from lightning_sp.preflight.first_batch import try_first_batch
from lightning_sp.rewrite import (
    AttentionInterception,
    FlexInterception,
    HuggingFaceRewrite,
    decoder_inputs,
    hugging_face_models,
)
from lightning_sp.rewrite.query_heads import named_query_heads, tried_query_heads
from lightning_sp.step.isolation import isolated
from lightning_sp.step.predictions import share_predictions, unsharded_output
from lightning_sp.step.run import Steps
from lightning_sp.step.run_state import RunState
from lightning_sp.trainer.features import check_trainer_features
from lightning_sp.trainer.processes import ProcessStrategy

# Of what this strategy adds to Lightning's checkpoint.
CHECKPOINT_KEY = "lightning_sp"
PRECISIONS = ("64-true", "32-true", "bf16-true", "bf16-mixed")


class SequenceParallelStrategy(ProcessStrategy):
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
        shard_size: int | Literal["auto"] = "auto",
        kernel: str = "auto",
        ring_transport: str = "auto",
        ring_method: str = "auto",
        activation_checkpointing: bool = False,
        compile: bool = False,
        preflight: bool = True,
        preflight_tokens: int | Literal["auto"] = "auto",
        shard_batch: bool = True,
        sequence_dims: dict[str, int] | None = None,
        labels_shifted: bool | None = None,
        packed_documents: bool | None = None,
        balance: str = "auto",
        save_distributed_checkpoint: bool = True,
        timeout_s: float = 300.0,
        process_group_backend: str | None = None,
        **unknown: Any,
    ) -> None:
        self.config = StrategyConfig.from_options(
            {
                "sequence_parallel_size": sequence_parallel_size,
                "data_parallel_size": data_parallel_size,
                "ulysses_size": ulysses_size,
                "ring_size": ring_size,
                "shard_size": shard_size,
                "kernel": kernel,
                "ring_transport": ring_transport,
                "ring_method": ring_method,
                "activation_checkpointing": activation_checkpointing,
                "compile": compile,
                "preflight": preflight,
                "preflight_tokens": preflight_tokens,
                "shard_batch": shard_batch,
                "sequence_dims": sequence_dims,
                "labels_shifted": labels_shifted,
                "packed_documents": packed_documents,
                "balance": balance,
                "save_distributed_checkpoint": save_distributed_checkpoint,
                "timeout_s": timeout_s,
                **unknown,
            }
        )
        super().__init__(process_group_backend=process_group_backend, timeout=timedelta(seconds=timeout_s))
        self._base_mesh: DeviceMesh | None = None
        self._mesh: SequenceMesh | None = None
        self._runner: Steps | None = None
        self._prepared: LightningModule | None = None
        self._interceptions = ExitStack()
        self._control_group: dist.ProcessGroup | None = None
        self._sequence_control_group: dist.ProcessGroup | None = None
        self._options = ShardOptions()
        self._batch: SequenceInfo | None = None
        self._window = TokenWindow()
        self._run_state = RunState()
        self._evaluated = (0, -1)  # loader of the evaluation batch in progress, and its place there
        self._preflight_due = False
        self._first_batch: Any = None
        self._balance_told = False

    @property
    def _steps(self) -> Steps:
        assert self._runner is not None
        return self._runner

    @property
    def _host_sequence_group(self) -> dist.ProcessGroup:
        """The ranks that share a sequence, on a backend for host objects."""
        return self._sequence_control_group or self.sequence_mesh.sequence_group

    # ---- what users and callbacks read

    @property
    def sequence_mesh(self) -> SequenceMesh:
        """Return the attention's mesh, with the layout of the batch in progress; known once `setup` has seen the model."""
        if self._mesh is None:
            raise SequenceParallelError("the attention's mesh is not known before the trainer has set up the model")
        return self._mesh if self._batch is None else replace(self._mesh, layout=self._batch.layout)

    @property
    def layout(self) -> SequenceLayout:
        """Return which tokens each rank holds of the batch in progress: what `lightning_sp.shard` and `unshard` take. Zigzag before one."""
        return self.sequence_mesh.layout

    @property
    def data_parallel_rank(self) -> int:
        """Return which samples this rank reads: what to split an iterable dataset by."""
        return 0 if self._base_mesh is None else int(self._base_mesh.get_local_rank("data_parallel"))

    @property
    def data_parallel_size(self) -> int:
        """Return how many groups of ranks read different samples."""
        return 1 if self._base_mesh is None else int(self._base_mesh["data_parallel"].size())

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks that hold different samples: the `process_group` of a metric of samples, computed from whole sequences.

        Metrics of tokens, computed from shards, need none: they are reduced over the world.
        """
        return self.device_mesh.get_group("data_parallel")

    @property
    def sequence_parallel_size(self) -> int:
        """Return how many ranks share one sequence."""
        return 1 if self._base_mesh is None else int(self._base_mesh["sequence_parallel"].size())

    @property
    def last_batch_shape(self) -> tuple[int, int, int] | None:
        """Return (rows, padded length, length) of the batch that was sharded last, in whole tokens; an encoder's and a decoder's together."""
        if self._batch is None:
            return None
        held = self._batch.sequences
        return self._batch.rows, sum(each.padded_length for each in held), sum(each.length for each in held)

    def unshard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return whole sequences from every rank's part of the current batch, without padding, in global order.

        Shapes: (..., s, ...) -> (..., S, ...) along `dim`. Communicates: one all_gather over the sequence's ranks.
        """
        if self._runner is not None and self._runner.context.reference is not None:
            return tensor
        length = None
        if self._batch is not None:
            held = {each.padded_length // self.layout.size: each.length for each in reversed(self._batch.sequences)}
            length = held.get(tensor.shape[dim], self._batch.length)
        # On CUDA the devices' group takes nothing that a step has moved to the host.
        on_host = tensor.device.type == "cpu"
        group = self._host_sequence_group if on_host else self.sequence_mesh.sequence_group
        return unshard(tensor, self.layout, group, dim=dim, length=length)

    # ---- mesh

    @property
    def device_mesh(self) -> DeviceMesh:
        """Return the mesh data_parallel x sequence_parallel x tensor_parallel."""
        if self._base_mesh is None:
            raise SequenceParallelError("the device mesh is not known before the processes have joined")
        return self._base_mesh

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    @override
    def setup_environment(self) -> None:
        Strategy.setup_environment(self)
        self._check_precision()
        assert self.lightning_module is not None
        check_trainer_features(self.lightning_module.trainer, self.lightning_module)
        self._setup_distributed()
        if self._base_mesh is None:
            degrees = resolve_degrees(self.config, self.world_size)
            resolve_shard_size(self.config, self.world_size)
            self._base_mesh = build_device_mesh(
                self.root_device.type,
                data_parallel_size=degrees.data_parallel_size,
                sequence_parallel_size=degrees.sequence_parallel_size,
            )
            if dist.get_backend() == "nccl":
                # Small agreements on the host, so that no step waits for the device.
                self._control_group = dist.new_group(backend="gloo", timeout=self._timeout)
                for first in range(0, self.world_size, degrees.sequence_parallel_size):
                    ranks = list(range(first, first + degrees.sequence_parallel_size))
                    group = dist.new_group(ranks, backend="gloo", timeout=self._timeout)
                    if self.global_rank in ranks:
                        self._sequence_control_group = group
        self.lightning_module._device_mesh = self._base_mesh

    def _check_precision(self) -> None:
        precision = str(self.precision_plugin.precision)
        if precision not in PRECISIONS:
            raise SequenceParallelError(
                f"precision={precision!r} is not supported: float16 needs a loss scale that all ranks share; use one of {', '.join(PRECISIONS)}"
            )

    # ---- model

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # Rank 0 draws the initial weights as a single process would; the others receive their shards and never hold the whole.
        elsewhere = self.global_rank != 0 if empty_init is None else empty_init
        with torch.device("meta") if elsewhere else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._forbid_inference_mode(trainer)
        trainer._accelerator_connector.use_distributed_sampler = False
        assert self.lightning_module is not None
        if self._prepared is not self.lightning_module:
            self._prepare(self.lightning_module)
        self._options = self._shard_options(self.lightning_module, trainer)
        self._intercept()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self._preflight_due = self.config.preflight and self.world_size > 1
            self._steps.start_run()
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            self._run_state.seed_ranks(
                int(self.broadcast(torch.initial_seed())), trainer.global_step, self.sequence_mesh
            )

    def _prepare(self, module: LightningModule) -> None:
        """Split the degrees by the model's heads, rewrite and shard it: once for a model."""
        check_unsharded(module)
        assert self._base_mesh is not None
        ulysses, ring = resolve_split(self.config, self.sequence_parallel_size, self._query_heads(module))
        self._batch = None  # of another model, perhaps in another layout
        self._mesh = SequenceMesh.build(self._base_mesh, ring_size=ring, ulysses_size=ulysses)
        check_ring_transport(self.config.ring_transport, self._mesh)
        context = SequenceContext(self._mesh, self.config.attention)
        self._runner = Steps(context, compiled=self.config.compile, control_group=self._control_group)
        self.model = self.precision_plugin.convert_module(module)
        if self.global_rank == 0:
            materialize_meta(module, torch.device("cpu"))
        source = whole_state(module) if self.global_rank == 0 else {}
        blocks = transformer_blocks(module)
        if self.config.activation_checkpointing:
            checkpoint_blocks(module, blocks)
        if self.config.compile:
            for block in blocks:
                block.compile()
        shard_size = resolve_shard_size(self.config, self.world_size)
        fsdp_mesh = build_fsdp_mesh(self.root_device.type, world_size=self.world_size, shard_size=shard_size)
        shard_model(module, blocks, fsdp_mesh)
        receive_weights(module, source, tied_parameters(module), self.root_device)
        module.to(self.root_device)
        start_root(module)
        self._prepared = module
        shared = not self.config.ring_transport.startswith("network") and self._mesh.shares_memory
        rank_zero_info(
            f"sequence_parallel: {self._mesh.describe()} over {self.world_size} ranks, parameters sharded over {shard_size}, "
            f"{len(blocks)} blocks{', activations checkpointed' if self.config.activation_checkpointing else ''}"
            f"{', ring through shared memory' if shared else ''}"
        )

    def _shard_options(self, module: LightningModule, trainer: Trainer) -> ShardOptions:
        """Return what is known of the batches: declared, or by the model and the data themselves."""
        packed = self.config.packed_documents
        if packed is None and isinstance(getattr(trainer, "datamodule", None), SequenceShardingDataModule):
            packed = True
        dims, shifted = dict(self.config.sequence_dims or {}), self.config.labels_shifted
        models = hugging_face_models(module)
        of_labels = decoder_inputs(models)
        if of_labels is not None and shifted is None:
            shifted = True  # the decoder's inputs are shifted instead
        return ShardOptions(
            dims,
            shifted,
            bool(models) and of_labels is None,
            packed,
            self.config.balance,
            self.root_device.type,
            decoder_inputs=of_labels,
        )

    def _query_heads(self, module: LightningModule) -> int | None:
        """Return what limits Ulysses: the heads that the model names, or those that reach attention in a forward without data."""
        heads = named_query_heads(module)
        if heads is not None or self.sequence_parallel_size == 1:
            return heads
        found: tuple[int | None, str] = (None, "")
        if self.global_rank == 0:
            with isolated(module, self.root_device):
                found = tried_query_heads(module)
        heads, reason = self.broadcast(found)
        if heads is None and (self.config.ulysses_size, self.config.ring_size) == ("auto", "auto"):
            rank_zero_info(
                f"sequence_parallel: how many heads the model has is not known ({reason}), so the sequence is split by ring alone, which serves "
                "any number; ulysses_size chooses otherwise"
            )
        return heads

    def _intercept(self) -> None:
        assert self.lightning_module is not None
        context = self._steps.context
        self._interceptions.close()
        for each in (
            CrossEntropyInterception(context),
            AttentionInterception(context, self.lightning_module),
            FlexInterception(context, self.lightning_module),
            HuggingFaceRewrite(context, self.lightning_module),
        ):
            self._interceptions.enter_context(each)

    @staticmethod
    def _forbid_inference_mode(trainer: Trainer) -> None:
        """FSDP2 fails at the training step after an inference_mode evaluation: inference tensors have no version counter."""
        for loop in (
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
            trainer.fit_loop.epoch_loop.val_loop,
        ):
            loop.inference_mode = False

    # ---- batch

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Give all ranks of a sequence the same samples, from the resumed position on."""
        assert self.lightning_module is not None
        training = self.lightning_module.trainer.training
        dp_rank, dp_size = self.data_parallel_rank, self.data_parallel_size
        loader = same_samples(
            dataloader,
            DataCoordinates(dp_rank, dp_size, self._host_sequence_group, self._control_group),
            training=training,
            accumulation=self._accumulate,
            seed=int(os.environ.get("PL_GLOBAL_SEED", 0)),
            by_hand=not self.config.shard_batch,
        )
        if training:
            self._run_state.resume_loader(loader)
        return loader

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        by_hand = not self.config.shard_batch
        assert self._mesh is not None
        options = replace(self._options, attention=self._steps.context.last_attention_patterns)
        local, info = collective_shard(batch, self._mesh, options, self._control_group, by_hand=by_hand)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if self._preflight_due and trainer.training:
            self._first_batch = batch
        if trainer.evaluating or trainer.predicting:
            self._note_evaluated(trainer, dataloader_idx)
        local = super().batch_to_device(local, device, dataloader_idx)
        self._batch = info.to(self.root_device)
        if info.balance is not None and not self._balance_told:
            self._balance_told = True
            rank_zero_info(f"sequence_parallel: {info.balance.describe()}")
        return local

    # ---- preflight

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        whole, self._first_batch = self._first_batch, None
        module = self.lightning_module
        if not self._preflight_due or whole is None or module is None:
            return
        self._preflight_due = False
        index = (batch_idx,) if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2) else ()
        before, tokens = self._batch, self.config.preflight_tokens

        def run(batch: Any, info: SequenceInfo) -> Any:
            self._batch = info
            return Strategy.training_step(self, Strategy.batch_to_device(self, batch), *index)

        try:
            try_first_batch(
                whole,
                module,
                self._steps,
                run,
                options=self._options,
                tokens=None if tokens == "auto" else tokens,
                by_hand=not self.config.shard_batch,
                device=self.root_device,
                sequence_group=self._host_sequence_group,
                control_group=self._control_group,
            )
        finally:
            self._batch = before

    # ---- steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._batch is not None
        assert self.lightning_module is not None
        self._run_state.note_micro_batch(self._batch.rows, self.lightning_module.trainer, self.sequence_mesh)
        self._batch = self._with_dropout(self._batch)
        output = self._steps.train(self._batch, lambda: Strategy.training_step(self, *args, **kwargs))
        if output is None or not self.lightning_module.automatic_optimization:
            self._steps.end()
        return output

    def _with_dropout(self, batch: SequenceInfo) -> SequenceInfo:
        assert self.lightning_module is not None
        step = self.lightning_module.trainer.global_step
        source = self._run_state.dropout_source(batch.rows, step, self.sequence_mesh)
        return replace(batch, dropout=source).to(self.root_device)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._steps.end_run()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        output = self._evaluate(super().predict_step, *args, **kwargs)
        assert self._batch is not None
        return unsharded_output(output, self._batch, self.unshard, self._host_sequence_group, self._control_group)

    @override
    def on_predict_end(self) -> None:
        """Give every rank the predictions of all samples, in the order of the dataset, each once."""
        super().on_predict_end()
        assert self.lightning_module is not None
        share_predictions(self.lightning_module.trainer.predict_loop, self.sequence_mesh, self._control_group)

    def _evaluate(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self._batch is not None
        assert self.lightning_module is not None
        filler = self._is_filler()
        return self._steps.evaluate(
            self._batch, lambda: run(*args, **kwargs), self.lightning_module, self.root_device, filler=filler
        )

    def _note_evaluated(self, trainer: Trainer, dataloader_idx: int) -> None:
        """Count the batches of each loader: a step that takes no batch_idx is not told it."""
        loop: Any = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
        first = loop.batch_progress.current.ready == 0 or dataloader_idx != self._evaluated[0]
        self._evaluated = (dataloader_idx, 0 if first else self._evaluated[1] + 1)

    def _is_filler(self) -> bool:
        if self.data_parallel_size == 1 or self.lightning_module is None:
            return False
        trainer = self.lightning_module.trainer
        loop: Any = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
        loaders, (dataloader_idx, batch_idx) = loop._combined_loader, self._evaluated
        return loaders is not None and is_filler_batch(loaders.flattened[dataloader_idx], batch_idx)

    # ---- gradients

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        step, module = self._steps.context.step, self.lightning_module
        if step is not None and module is not None and module.automatic_optimization and self._accumulate > 1:
            closure_loss = self._window.weigh(closure_loss, step.token_counts)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self.lightning_module is not None and self.lightning_module.automatic_optimization:
            self._steps.end()

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate without communication; Lightning enters this for all but a window's last micro-batch."""
        assert self.lightning_module is not None
        with without_gradient_sync(self.lightning_module):
            yield

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        def weighted() -> Any:
            result = closure()
            check_same_gradients(self.lightning_module, self._control_group)
            factor = self._window.close(self._accumulate)
            if factor is not None:
                # After the backward, before Lightning clips.
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                            grad.mul_(factor.to(grad.dtype))
            return result

        return super().optimizer_step(optimizer, weighted, model, **kwargs)

    @property
    def _accumulate(self) -> int:
        module = self.lightning_module
        return int(module.trainer.accumulate_grad_batches) if module is not None else 1

    # ---- checkpoint

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's sharded state, by the user's names."""
        assert self.lightning_module is not None
        # After an evaluation forward the root stays gathered.
        reshard(self.lightning_module)
        return model_state(self.lightning_module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's sharded state, by the user's parameter names."""
        assert self.lightning_module is not None
        reshard(self.lightning_module)
        return optimizer_state(self.lightning_module, getattr(optimizer, "optimizer", optimizer))

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise SequenceParallelError(
                f"storage_options={storage_options!r} are not supported: checkpoints are written to shared local paths"
            )
        path = local_path(self.broadcast(os.fspath(filepath))).absolute()
        assert self.lightning_module is not None
        shard_size = resolve_shard_size(self.config, self.world_size)
        checkpoint[CHECKPOINT_KEY] = self._run_state.stored(
            self.lightning_module.trainer, self.sequence_mesh, shard_size, self._control_group
        )
        described = save_checkpoint(
            checkpoint, path, as_folder=self.config.save_distributed_checkpoint, group=self._control_group
        )
        if described and not self._described:
            self._described = True
            rank_zero_info(
                f"sequence_parallel: hyperparameters that are no plain values are stored as text: {'; '.join(described)}"
            )

    _described = False

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        reshard(module)
        checkpoint = load_checkpoint(
            local_path(self.broadcast(os.fspath(checkpoint_path))),
            module,
            self.optimizers if fitting else None,
            strict=module.strict_loading,
            weights_only=weights_only is not False,
            group=self._control_group,
        )
        if fitting:
            stored = checkpoint.get(CHECKPOINT_KEY) or {}
            self._run_state.resume_position(
                stored.get("position"), checkpoint["loops"]["fit_loop"], module.trainer, dp_size=self.data_parallel_size
            )
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        load_model_state(self.lightning_module, checkpoint["state_dict"], strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        for index, (optimizer, state) in enumerate(zip(self.optimizers, checkpoint["optimizer_states"], strict=True)):
            load_optimizer_state(self.lightning_module, optimizer, state, index=index)
        trainer = self.lightning_module.trainer
        self._run_state.restore_random(checkpoint.get(CHECKPOINT_KEY), trainer, self.sequence_mesh)

    # ---- end

    @override
    def teardown(self) -> None:
        self._interceptions.close()
        if self._runner is not None:
            self._runner.end()
        self._run_state.end_of_run()
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Leave the registry alone: `registration` owns our place in it."""
