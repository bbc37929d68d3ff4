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
# Steps, and how many of them come before the clock: of a length, and from another on, whose steps take their time.
_STEPS, _WARM = {0: 5, 131_072: 3}, {0: 2, 131_072: 1}


def _of_length(counts: dict[int, int], length: int) -> int:
    return counts[max(least for least in counts if least <= length)]


class _Tokens(Dataset[dict[str, Tensor]]):
    """Rows of random tokens."""

    def __init__(self, length: int, vocabulary: int) -> None:
        self.length, self.vocabulary = length, vocabulary

    def __len__(self) -> int:
        return _of_length(_STEPS, self.length)

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

    def __init__(self, setting: Setting, steps: int, profiled: bool) -> None:
        self.setting, self.last, self.profiled = setting, steps - 1, profiled
        self.seconds: list[float] = []
        self.predicted = self.peak = 0
        self.policy = ""
        self.events: list[Any] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        checkpoints = block_checkpoints(module)
        self.policy, step = checkpoints.policy, checkpoints.activations.step
        if index == self.last and step is not None:
            held = model_bytes(module, checkpoints.blocks, trainer.optimizers, trainer.strategy.root_device)
            self.predicted = peak_bytes(self.policy, step, held, batch["input_ids"].numel())
        self.setting.wait()
        if self.setting.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if self.profiled and index == self.last:
            activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (self.setting.device == "cuda")]
            self.profile = profile(activities=activities)
            self.profile.__enter__()
        self.begin = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        self.setting.wait()
        self.seconds.append(time.perf_counter() - self.begin)
        if self.profiled and index == self.last:
            self.profile.__exit__(None, None, None)
            self.events = list(self.profile.events() or [])
        if self.setting.device == "cuda":
            self.peak = torch.cuda.max_memory_allocated()


def trained(length: int, setting: Setting, profiled: bool = False, **strategy: Any) -> tuple[_Meter, _Decoder]:
    """Train some steps of a sequence each."""
    layers = 2 if setting.tiny else _LAYERS
    config = LlamaConfig(num_layers=layers, **(_TINY if setting.tiny else _LLAMA_8B))  # type: ignore[arg-type]
    steps = _of_length(_STEPS, length)
    module, meter = _Decoder(config), _Meter(setting, steps, profiled)
    trainer = pl.Trainer(
        strategy=SequenceParallelStrategy(**strategy), accelerator="gpu" if setting.device == "cuda" else "cpu", devices=1,
        precision="bf16-mixed" if setting.device == "cuda" else "32-true", max_steps=steps, callbacks=[meter], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(_Tokens(length, config.vocab_size), batch_size=1))
    return meter, module


def stepped(length: int, setting: Setting, **strategy: Any) -> Row:
    """Measure a step: its time, its share of the device's peak, its memory."""
    meter, module = trained(length, setting, **strategy)
    seconds = statistics.median(meter.seconds[_of_length(_WARM, length) :])
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


def waits(length: int, setting: Setting, **strategy: Any) -> Row:
    """Profile a step: how much of it the device worked, what the host waited in while it did not, and what of the copies to and from the
    host hid behind kernels."""
    meter, _ = trained(length, setting, profiled=True, **strategy)
    device, host = spans(meter.events, of_device=True), spans(meter.events, of_device=False)
    copies = [span for span in device if "HtoD" in span.name or "DtoH" in span.name]
    kernels = [span for span in device if span not in set(copies)]
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
        "copies ms": f"{busy_us(copies) / 1000:.1f}",
        "of them behind kernels": f"{(busy_us(kernels) + busy_us(copies) - busy_us([*kernels, *copies])) / 1000:.1f}",
        "in": "; ".join(f"{gap.wait} {(gap.end - gap.begin) / 1000:.2f} ms" for gap in named[:5]),
        "most time in": "; ".join(f"{name} {us / 1000:.1f} ms" for name, us in longest(kernels, 12)),
    }


def _lengths(setting: Setting) -> tuple[int, ...]:
    return (64,) if setting.tiny else (32_768, 65_536, 131_072, 262_144)


def _steps(setting: Setting) -> Iterator[Case]:
    first, *others = _lengths(setting)
    cuda = setting.device == "cuda"  # a CPU's host memory is its own
    ways: dict[str, dict[str, Any]] = {"auto": {}, **({"compile": dict(compile=True)} if cuda else {})}
    ways |= {policy: dict(activation_checkpointing=policy) for policy in ("full", "selective")}
    for name, options in ways.items():
        yield f"{first:,} tokens, {name}", partial(stepped, first, setting, **options)
    host = dict(activation_checkpointing="full", activation_offload="host", mlp_tile_tokens="auto")
    for length in others:
        yield f"{length:,} tokens, auto", partial(stepped, length, setting)
        if cuda:
            yield f"{length:,} tokens, inputs on the host, MLPs in tiles", partial(stepped, length, setting, **host)


def _profile(setting: Setting) -> Iterator[Case]:
    first, *others = _lengths(setting)
    yield f"{first:,} tokens", partial(waits, first, setting)
    for horizon in (4, 1) if setting.device == "cuda" else ():
        options = dict(activation_checkpointing="full", activation_offload="host", activation_loading_horizon=horizon)
        yield (
            f"{others[0]:,} tokens, inputs on the host, horizon {horizon}",
            partial(waits, others[0], setting, **options),
        )


STEPS = Part(
    "a training step of blocks of Llama 3 8B's shape: time, MFU, peak memory beside its prediction", 540, _steps
)
PROFILE = Part("where the device had no work, and what the host waited in then", 120, _profile)
