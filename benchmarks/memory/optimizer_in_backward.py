"""Memory of a rank with `optimizer_in_backward` and without: where a step begins, and its peak.

Run with ``OMP_NUM_THREADS=1 python -m benchmarks.memory.optimizer_in_backward``. The third step of a Llama on two ranks, 38.6M parameters in
float32, 12 blocks, 64 tokens, SGD without momentum: gradients are nearly all that a step makes. New processes for each line.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.instruments.resident import map_tensors, resident_bytes
from lightning_sp import SequenceParallelStrategy
from lightning_sp.models import Llama, LlamaConfig
from lightning_sp.parallelize.memory.model_bytes import largest_unit_bytes
from lightning_sp.testing import RankPool, trainer_of_ranks

_MIB = 2**20
_SIZES = dict(vocab_size=64, dim=512, num_layers=12, num_heads=8, num_kv_heads=8, hidden_dim=1408)


class _Measured(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Module | None = None
        self.begin = self.peak = 0

    def configure_model(self) -> None:
        if self.model is None:
            self.model = Llama(LlamaConfig(**_SIZES))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        logits = self.model(batch["input_ids"], batch["position_ids"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, foreach=False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            Path("/proc/self/clear_refs").write_text("5")
            self.begin = resident_bytes()

    def on_train_batch_end(self, *args: Any) -> None:
        lines = Path("/proc/self/status").read_text().splitlines()
        self.peak = next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def measured(in_backward: bool) -> tuple[float, float, float, float]:
    """Return what is resident where the third step begins, its peak, the shards of all gradients and those of the largest unit, in MiB."""
    map_tensors()
    torch.manual_seed(0)
    module = _Measured()
    tokens = torch.randint(64, (3, 64))
    batch = dict(input_ids=tokens, shift_labels=tokens, position_ids=torch.arange(64).expand(3, 64))
    rows = [{name: value[row] for name, value in batch.items()} for row in range(3)]
    strategy = SequenceParallelStrategy(ulysses_size=2, preflight=False, optimizer_in_backward=in_backward)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    pl.Trainer(**trainer_of_ranks(2), strategy=strategy, max_steps=3, **quiet).fit(module, DataLoader(rows))  # type: ignore[arg-type]
    shards = sum(each.to_local().numel() * each.element_size() for each in module.parameters())  # type: ignore[operator]
    return tuple(each / _MIB for each in (module.begin, module.peak, shards, largest_unit_bytes(module)))  # type: ignore[return-value]


def main() -> None:
    """Print a line for each, of rank 0."""
    for in_backward in (False, True):
        with RankPool(2) as pool:
            begin, peak, shards, unit = pool.run(partial(measured, in_backward))[0]
        print(
            f"optimizer_in_backward={in_backward}: {begin:.1f} MiB where a step begins, {peak:.1f} at its peak; gradients {shards:.1f}, of the "
            f"largest unit {unit:.1f}"
        )


if __name__ == "__main__":
    main()
