"""Tokens and time against a clock that the test moves."""

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_sp.callbacks import AttentionShape, ThroughputMonitor
from lightning_sp.callbacks.flops import model_flops, num_matrix_parameters
from lightning_sp.callbacks.plot import read_curve
from lightning_sp.errors import SequenceParallelError
from lightning_sp.models import CausalLM
from tests.callbacks.runs import LLAMA, fit, loader

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    # Lightning 2.6's own call of torch's pytree.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]


class Clock:
    """A clock that a step moves by one second and a validation by a hundred."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


class TickingLM(CausalLM):
    def __init__(self, clock):
        super().__init__(LLAMA, max_steps=20)
        self.clock = clock

    def training_step(self, batch, batch_idx):
        self.clock.now += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.clock.now += 100
        super().validation_step(batch, batch_idx)


def test_throughput_counts_steps_and_leaves_validation_and_the_first_step_out(tmp_path, monkeypatch):
    clock, monitor = Clock(), ThroughputMonitor()
    monkeypatch.setattr("lightning_sp.callbacks.throughput.time", clock)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        val_check_interval=4,
        logger=CSVLogger(tmp_path, name="", version="logs"),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[monitor],
    )
    trainer.fit(TickingLM(clock), loader(8), loader(2))
    assert monitor.tokens_seen == 8 * 32
    # 8 micro-batches of one second: 2 make the first step, 6 are timed.
    assert (monitor.timed_tokens, monitor.timed_s) == (6 * 32, 6.0)
    assert monitor.mean_tokens_per_s == 32.0
    metrics = tmp_path / "logs" / "metrics.csv"
    assert read_curve(metrics, "tokens_per_s").values == [32.0] * 3
    assert read_curve(metrics, "tokens_seen").values == [128.0, 192.0, 256.0]
    assert read_curve(metrics, "tokens_per_s_per_device").values == [32.0] * 3
    flops = model_flops(
        num_parameters=num_matrix_parameters(trainer.lightning_module),
        attention=AttentionShape(2, 4, 8),
        num_sequences=2,
        sequence_length=16,
    )
    assert read_curve(metrics, "model_flops_per_s_per_device").values == pytest.approx([flops] * 3, rel=1e-6)
    assert read_curve(metrics, "mfu").values == []


def test_throughput_counts_on_from_a_checkpoint(tmp_path):
    fit(
        tmp_path / "a",
        ThroughputMonitor(),
        ModelCheckpoint(tmp_path / "kept", "stop"),
        enable_checkpointing=True,
        max_steps=4,
    )
    monitor = ThroughputMonitor()
    fit(tmp_path / "b", monitor, ckpt_path=tmp_path / "kept" / "stop.ckpt", max_epochs=2, num_batches=4)
    assert monitor.tokens_seen == 8 * 32


def test_throughput_refuses_batches_whose_tokens_it_cannot_count(tmp_path):
    class Tensors(CausalLM):
        def training_step(self, batch, batch_idx):
            return self.model.head.weight.sum()

    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ThroughputMonitor()],
        limit_val_batches=0,
    )
    with pytest.raises(SequenceParallelError, match=r"batch\['input_ids'\] of shape \(B, S\)"):
        trainer.fit(Tensors(LLAMA), DataLoader([torch.zeros(2, 3)], batch_size=None), loader(1))
