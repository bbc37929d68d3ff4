"""A training step with the loss in chunks and with logits, in turn: CPU-seconds of all ranks and the peak of a rank.

    python -m benchmarks.memory.linear_loss_step --ranks 2 --tokens 2048 [--global-view]

A Llama of `--layers` blocks, dim 512, hidden 1408, vocabulary 32000, float32. Each round runs both ways, three steps each, of which the last one
counts; the median over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks.instruments.resident import peak_growth
from lightning_sp import SequenceParallelStrategy
from lightning_sp.models import LlamaConfig
from lightning_sp.testing import RankPool

VOCABULARY, STEPS = 32000, 3


class Tokens(Dataset):
    """Random tokens; the time of a step does not depend on which."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, VOCABULARY, (self.length + 1,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens[:-1], "shift_labels": tokens[1:], "position_ids": torch.arange(self.length)}


class User(pl.LightningModule):
    """What a user writes; it times the last step."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.model: Any = LlamaConfig(
            vocab_size=VOCABULARY, dim=512, num_layers=layers, num_heads=8, hidden_dim=1408
        ).build()
        self.seconds, self.peak_bytes = 0.0, 0

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        logits = self.model(batch["input_ids"], batch["position_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS - 1:
            self._growth = peak_growth()
            self._measured = self._growth.__enter__()
            self._start = time.process_time()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS - 1:
            self.seconds = time.process_time() - self._start
            self._growth.__exit__(None, None, None)
            self.peak_bytes = self._measured.peak_bytes

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def step(chunk: Any, ranks: int, tokens: int, layers: int, global_view: bool) -> tuple[float, float]:
    """Return the CPU-seconds and the peak in MiB of a rank's last step."""
    torch.manual_seed(0)
    user = User(layers)
    trainer = pl.Trainer(
        accelerator="cpu", devices=ranks, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        max_epochs=1, strategy=SequenceParallelStrategy(preflight=False, loss_chunk_tokens=chunk, global_view=global_view),
    )  # fmt: skip
    trainer.fit(user, DataLoader(Tokens(tokens * ranks), batch_size=1))
    return user.seconds, user.peak_bytes / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("ranks", 1), ("tokens", 2048), ("layers", 2), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--global-view", action="store_true")
    given = parser.parse_args()
    spent: dict[str, list[tuple[float, float]]] = {"chunks": [], "logits": []}
    with RankPool(given.ranks, timeout_s=900.0) as pool:
        for _ in range(given.rounds):
            for name, chunk in (("chunks", "auto"), ("logits", None)):
                answers = pool.run(step, chunk, given.ranks, given.tokens, given.layers, given.global_view)
                spent[name].append((sum(each for each, _ in answers), max(each for _, each in answers)))
    for name, values in spent.items():
        seconds, mib = (statistics.median(each) for each in zip(*values, strict=True))
        print(f"{name}: {seconds:.2f} CPU-s of all ranks, peak of a rank {mib:.0f} MiB above its begin", flush=True)
    ratios = [a[0] / b[0] for a, b in zip(spent["chunks"], spent["logits"], strict=True)]
    print(
        f"CPU-seconds with chunks over those with logits, of pairs: median {statistics.median(ratios):.3f}, {sorted(ratios)}"
    )


if __name__ == "__main__":
    main()
