"""Training steps of blocks of Llama 3 8B's shape through a Trainer on one device: time, MFU, peak memory beside its prediction, waits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

from benchmarks.gpu.part import Case, Part, Row, Setting
from benchmarks.gpu.timeline import busy_us, gaps, longest, spans
from lightning_sp import SequenceParallelStrategy
from lightning_sp.callbacks import AttentionShape
from lightning_sp.callbacks.flops import model_flops, num_matrix_parameters, peak_flops
from lightning_sp.models import Llama, LlamaConfig
from lightning_sp.parallelize import block_checkpoints
from lightning_sp.parallelize.memory.memory_prediction import GIB, peak_bytes
from lightning_sp.parallelize.memory.model_bytes import model_bytes

_LLAMA_8B = dict(dim=4096, num_heads=32, num_kv_heads=8, hidden_dim=14336, vocab_size=32_000, rope_theta=500_000.0)
_TINY = dict(dim=64, num_heads=4, num_kv_heads=2, hidden_dim=96, vocab_size=97)
# Blocks: what fits beside AdamW's state in 80 GB with room for tokens.
_LAYERS = 4
_STEPS, _WARM = 5, 2


class _Tokens(Dataset[dict[str, Tensor]]):
    """Rows of random tokens."""

    def __init__(self, length: int, vocabulary: int) -> None:
        self.length, self.vocabulary = length, vocabulary

    def __len__(self) -> int:
        return _STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.randint(0, self.vocabulary, (self.length + 1,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row[:-1], "shift_labels": row[1:], "position_ids": torch.arange(self.length)}


class _Decoder(pl.LightningModule):
    """What a user writes. Its head is found as Hugging Face's are, so that no logits are made."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = Llama(self.config)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        logits = self.model(batch["input_ids"], position_ids=batch["position_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class _Meter(pl.Callback):
    """Times steps, the device waited for at each end; in the last one a profile, of which no wait is ours."""

    def __init__(self, setting: Setting, profiled: bool) -> None:
        self.setting, self.profiled = setting, profiled
        self.seconds: list[float] = []
        self.predicted = self.peak = 0
        self.policy = ""
        self.events: list[Any] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        checkpoints = block_checkpoints(module)
        self.policy, step = checkpoints.policy, checkpoints.activations.step
        if index == _STEPS - 1 and step is not None:
            held = model_bytes(module, checkpoints.blocks, trainer.optimizers, trainer.strategy.root_device)
            self.predicted = peak_bytes(self.policy, step, held, batch["input_ids"].numel())
        self.setting.wait()
        if self.setting.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if self.profiled and index == _STEPS - 1:
            activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (self.setting.device == "cuda")]
            self.profile = profile(activities=activities)
            self.profile.__enter__()
        self.begin = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        self.setting.wait()
        self.seconds.append(time.perf_counter() - self.begin)
        if self.profiled and index == _STEPS - 1:
            self.profile.__exit__(None, None, None)
            self.events = list(self.profile.events() or [])
        if self.setting.device == "cuda":
            self.peak = torch.cuda.max_memory_allocated()


def trained(length: int, setting: Setting, profiled: bool = False, **strategy: Any) -> tuple[_Meter, _Decoder]:
    """Train some steps of a sequence each."""
    layers = 2 if setting.tiny else _LAYERS
    config = LlamaConfig(num_layers=layers, **(_TINY if setting.tiny else _LLAMA_8B))  # type: ignore[arg-type]
    module, meter = _Decoder(config), _Meter(setting, profiled)
    trainer = pl.Trainer(
        strategy=SequenceParallelStrategy(**strategy), accelerator="gpu" if setting.device == "cuda" else "cpu", devices=1,
        precision="bf16-mixed" if setting.device == "cuda" else "32-true", max_steps=_STEPS, callbacks=[meter], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(_Tokens(length, config.vocab_size), batch_size=1))
    return meter, module


def stepped(length: int, setting: Setting, **strategy: Any) -> Row:
    """Measure a step: its time, its share of the device's peak, its memory."""
    meter, module = trained(length, setting, **strategy)
    seconds = statistics.median(meter.seconds[_WARM:])
    config = module.config
    shape = AttentionShape(config.num_layers, config.num_heads, config.dim // config.num_heads)
    flops = model_flops(
        num_parameters=num_matrix_parameters(module), attention=shape, num_sequences=1, sequence_length=length
    )
    peak = peak_flops(setting.device_name, "bf16-mixed")
    return {
        "policy": meter.policy,
        "s": f"{seconds:.3f}",
        "tokens/s": f"{length / seconds:,.0f}",
        "TFLOP/s": f"{flops / seconds / 1e12:.3g}",
        "MFU": f"{flops / seconds / peak:.1%}" if peak else "",
        "peak GiB": f"{meter.peak / GIB:.2f}" if meter.peak else "",
        "predicted GiB": f"{meter.predicted / GIB:.2f}" if meter.predicted else "",  # by "auto" alone
    }


def waits(length: int, setting: Setting) -> Row:
    """Profile a step: how much of it the device worked, and what the host waited in while it did not."""
    meter, _ = trained(length, setting, profiled=True)
    kernels, host = spans(meter.events, of_device=True), spans(meter.events, of_device=False)
    if not kernels:  # a CPU: its own operators are the work
        kernels = [span for span in host if span.name.startswith("aten::")]
    least = 20.0
    idle = gaps(kernels, host, least)
    named = [gap for gap in idle if gap.wait]
    whole = kernels[-1].end - kernels[0].begin
    return {
        "ms": f"{whole / 1000:.1f}",
        "kernels ms": f"{busy_us(kernels) / 1000:.1f}",
        f"gaps over {least:.0f} us": len(idle),
        "of them ms": f"{sum(gap.end - gap.begin for gap in idle) / 1000:.2f}",
        "gaps in which the host waits": len(named),
        "in": "; ".join(f"{gap.wait} {(gap.end - gap.begin) / 1000:.2f} ms" for gap in named[:5]),
        "most time in": "; ".join(f"{name} {us / 1000:.1f} ms" for name, us in longest(kernels, 12)),
    }


def _lengths(setting: Setting) -> tuple[int, ...]:
    return (64,) if setting.tiny else (32_768, 131_072, 65_536, 262_144)


def _steps(setting: Setting) -> Iterator[Case]:
    first, *others = _lengths(setting)
    yield f"{first:,} tokens, auto", partial(stepped, first, setting)
    if setting.device == "cuda":
        yield f"{first:,} tokens, compile", partial(stepped, first, setting, compile=True)
    for length in others[:1]:
        yield f"{length:,} tokens, auto", partial(stepped, length, setting)
    for policy in ("full", "selective"):
        yield f"{first:,} tokens, {policy}", partial(stepped, first, setting, activation_checkpointing=policy)
    for length in others[1:]:
        yield f"{length:,} tokens, auto", partial(stepped, length, setting)
    if setting.device == "cuda":
        options = dict(activation_checkpointing="full", activation_offload="host")
        yield f"{others[-1]:,} tokens, inputs on the host", partial(stepped, others[-1], setting, **options)


def _profile(setting: Setting) -> Iterator[Case]:
    first = _lengths(setting)[0]
    yield f"{first:,} tokens", partial(waits, first, setting)


STEPS = Part(
    "a training step of blocks of Llama 3 8B's shape: time, MFU, peak memory beside its prediction", 540, _steps
)
PROFILE = Part("where the device had no work, and what the host waited in then", 120, _profile)
