"""How many tokens a second the whole job trains on, each token counted once.

Lightning's own monitor multiplies what one rank sees by the world size: under sequence parallelism the ranks of a group
hold parts of the same sequence, and it counts every token as often as the group has ranks.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_sp.callbacks.flops import (
    AttentionShape,
    find_attention_shape,
    model_flops,
    num_matrix_parameters,
    peak_flops,
)
from lightning_sp.data.loaders.replace_sampler import training_sampler
from lightning_sp.errors import SequenceParallelError
from lightning_sp.strategy import SequenceParallelStrategy


def global_batch_shape(trainer: Trainer, batch: Any, batch_idx: int) -> tuple[int, int]:
    """Return (sequences, tokens of each) of the micro-batch over all ranks; padding and repeated samples are left out.

    The sequence-parallel strategy knows the batch's shape from before it was sharded. Under any other strategy a process
    is a data-parallel rank, and its batch is whole.
    """
    strategy = trainer.strategy
    if isinstance(strategy, SequenceParallelStrategy) and strategy.last_batch_shape is not None:
        num_rows, _, length = strategy.last_batch_shape
        loaders = trainer.fit_loop._combined_loader
        sampler = training_sampler(loaders.flattened[0]) if loaders is not None else None
        rows = num_rows * strategy.data_parallel_size if sampler is None else sampler.num_samples_in(batch_idx)
        return rows, length
    input_ids = batch.get("input_ids") if isinstance(batch, dict) else None
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2:
        raise SequenceParallelError(
            "ThroughputMonitor counts tokens by batch['input_ids'] of shape (B, S), which this batch does not have; "
            "use the sequence_parallel strategy, or leave the callback out"
        )
    return input_ids.shape[0] * trainer.world_size, input_ids.shape[1]


class ThroughputMonitor(Callback):
    """Log tokens/s, tokens/s/device, model FLOP/s per device, and their share of the device's peak where it is known.

    Rates are over the steps since the last log, at every ``log_every_n_steps`` optimizer steps. The first step, which
    warms up, and validation are left out of the time. Nothing is synchronised: on CUDA a single rate may run ahead of the
    device, their mean does not.

    Logs: ``tokens_seen``, ``tokens_per_s``, ``tokens_per_s_per_device``, and, where the attention's shape is known,
    ``model_flops_per_s_per_device`` and ``mfu``.

    Args:
        attention: The model's attention, for its FLOPs. Found in the model's configuration when not given; where there
            is none, FLOPs are not reported, with one line of notice.
    """

    def __init__(self, attention: AttentionShape | None = None) -> None:
        self.attention = attention
        self.tokens_seen = 0
        self.timed_tokens = 0
        self.timed_s = 0.0
        self._num_parameters = 0
        self._peak_flops: float | None = None
        self._window_start: float | None = None
        self._window_tokens = 0
        self._window_flops = 0
        self._pause_start: float | None = None

    @property
    def mean_tokens_per_s(self) -> float | None:
        """Tokens/s over all timed steps, None before there is one."""
        return self.timed_tokens / self.timed_s if self.timed_s else None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the parameters and look up the device's peak."""
        self._window_start = None
        self._num_parameters = num_matrix_parameters(pl_module)
        attention = self.attention or find_attention_shape(pl_module)
        if attention is None:
            rank_zero_info(
                "ThroughputMonitor: FLOPs are not reported, for no part of the model has a config with its layers, heads "
                "and head dim; give ThroughputMonitor(attention=AttentionShape(...))"
            )
        self.attention = attention
        device = trainer.strategy.root_device
        if device.type == "cuda":
            self._peak_flops = peak_flops(torch.cuda.get_device_name(device), str(trainer.precision))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the micro-batch; at a logged optimizer step close the window."""
        num_sequences, sequence_length = global_batch_shape(trainer, batch, batch_idx)
        self.tokens_seen += num_sequences * sequence_length
        if self._window_start is None:
            if not trainer.fit_loop._should_accumulate():
                self._open_window()
            return
        self._window_tokens += num_sequences * sequence_length
        if self.attention is not None:
            self._window_flops += model_flops(
                num_parameters=self._num_parameters,
                attention=self.attention,
                num_sequences=num_sequences,
                sequence_length=sequence_length,
            )
        if trainer._logger_connector.should_update_logs and not trainer.fit_loop._should_accumulate():
            self._close_window(trainer, pl_module)

    def _open_window(self) -> None:
        self._window_start, self._window_tokens, self._window_flops = time.perf_counter(), 0, 0

    def _close_window(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._window_start is not None
        elapsed_s = time.perf_counter() - self._window_start
        self.timed_tokens += self._window_tokens
        self.timed_s += elapsed_s
        tokens_per_s = self._window_tokens / elapsed_s
        pl_module.log("tokens_per_s", tokens_per_s, prog_bar=True)
        pl_module.log("tokens_per_s_per_device", tokens_per_s / trainer.world_size)
        pl_module.log("tokens_seen", float(self.tokens_seen))
        if self.attention is not None:
            flops_per_s = self._window_flops / elapsed_s / trainer.world_size
            pl_module.log("model_flops_per_s_per_device", flops_per_s)
            if self._peak_flops is not None:
                pl_module.log("mfu", flops_per_s / self._peak_flops, prog_bar=True)
        self._open_window()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._pause_start = time.perf_counter()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the clock run on."""
        if self._window_start is not None and self._pause_start is not None:
            self._window_start += time.perf_counter() - self._pause_start
        self._pause_start = None

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return how many tokens were trained on."""
        return {"tokens_seen": self.tokens_seen}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from a checkpoint."""
        self.tokens_seen = int(state_dict["tokens_seen"])
