"""What the loss in chunks and checkpoint policies cost: a training step each way, in turn; tokens/s, CPU-seconds of all ranks, peak of a rank.

    python -m benchmarks.memory.linear_loss_step --ranks 2 --tokens 2048 [--global-view]
    python -m benchmarks.memory.linear_loss_step --ranks 2 --layers 8 --tokens 4096 --rounds 15 --ways logits chunks selective
    python -m benchmarks.memory.linear_loss_step --ranks 2 --layers 8 --tokens 4096 --rounds 15 --ways auto every_2 selective --budget-gib 2

A Llama of `--layers` blocks, dim 512, hidden 1408, vocabulary 32000, float32. Each round runs all ways, three steps each, two short ones and one
that counts; the median over rounds. Ways: "chunks", the default loss; "logits", without it; and checkpoint policies, with the default loss.
Of "auto" it says what it took for the step that counts.
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
from tqdm import tqdm

from benchmarks.instruments.resident import peak_growth
from lightning_sp import SequenceParallelStrategy
from lightning_sp.models import LlamaConfig
from lightning_sp.parallelize import block_checkpoints
from lightning_sp.testing import RankPool

VOCABULARY, STEPS = 32000, 3
# Of a rank, in the steps that warm up.
SHORT = 256


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random tokens; the time of a step does not depend on which."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = self.length if index == STEPS - 1 else min(self.length, 2 * SHORT)
        tokens = torch.randint(0, VOCABULARY, (length + 1,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens[:-1], "shift_labels": tokens[1:], "position_ids": torch.arange(length)}


class User(pl.LightningModule):
    """What a user writes; it times the last step."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.model: Any = LlamaConfig(
            vocab_size=VOCABULARY, dim=512, num_layers=layers, num_heads=8, hidden_dim=1408
        ).build()
        self.seconds, self.wall_s, self.peak_bytes = 0.0, 0.0, 0

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        logits = self.model(batch["input_ids"], batch["position_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS - 1:
            self._growth = peak_growth()
            self._measured = self._growth.__enter__()
            self._start, self._wall = time.process_time(), time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS - 1:
            self.seconds, self.wall_s = time.process_time() - self._start, time.perf_counter() - self._wall
            self._growth.__exit__(None, None, None)
            self.peak_bytes = self._measured.peak_bytes

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def step(
    way: str, ranks: int, tokens: int, layers: int, global_view: bool, budget_gib: float
) -> tuple[float, float, float, str]:
    """Return the CPU-seconds of a rank's last step, its wall seconds, its peak in MiB, and the policy that was taken."""
    torch.manual_seed(0)
    user = User(layers)
    chunk: Any = None if way == "logits" else "auto"
    policy = "none" if way in ("logits", "chunks") else way
    budget: Any = budget_gib if way == "auto" else "auto"
    strategy = SequenceParallelStrategy(
        preflight=False, loss_chunk_tokens=chunk, global_view=global_view, activation_checkpointing=policy, memory_budget_gib=budget
    )  # fmt: skip
    trainer = pl.Trainer(
        accelerator="cpu", devices=ranks, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        max_epochs=1, strategy=strategy,
    )  # fmt: skip
    trainer.fit(user, DataLoader(Tokens(tokens * ranks), batch_size=1))
    return user.seconds, user.wall_s, user.peak_bytes / 2**20, block_checkpoints(user).policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 1), ("tokens", 2048), ("layers", 2), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ways", nargs="+", default=["logits", "chunks"], metavar="WAY", help="held against the first")
    parser.add_argument("--budget-gib", type=float, default=2.0, help="of a rank, for auto")
    parser.add_argument("--global-view", action="store_true")
    given = parser.parse_args()
    spent: dict[str, list[tuple[float, float, float]]] = {way: [] for way in given.ways}
    taken: dict[str, set[str]] = {way: set() for way in given.ways}
    with RankPool(given.ranks, timeout_s=1800.0) as pool:
        for _ in tqdm(range(given.rounds), desc="rounds"):
            for way in given.ways:
                answers = pool.run(
                    step, way, given.ranks, given.tokens, given.layers, given.global_view, given.budget_gib
                )
                cpu, wall, peak, policies = zip(*answers, strict=True)
                taken[way].update(policies)
                spent[way].append((sum(cpu), max(wall), max(peak)))
    tokens, first = given.tokens * given.ranks, spent[given.ways[0]]
    for way, values in spent.items():
        seconds, wall, mib = (statistics.median(each) for each in zip(*values, strict=True))
        most = f"peak of a rank {mib:.0f} MiB above its begin"
        name = f"auto, which took {', '.join(sorted(taken[way]))}" if way == "auto" else way
        print(f"{name}: {tokens / wall:.0f} tokens/s, {seconds:.2f} CPU-s of all ranks, {most}{over(values, first)}")


def over(values: list[tuple[float, float, float]], first: list[tuple[float, float, float]]) -> str:
    """Return the medians of ratios to the first way, of pairs, with their quartiles: of tokens/s and of CPU-seconds."""
    if values is first or len(values) < 2:
        return ""
    found = []
    for name, ratios in (
        ("tokens/s", [b[1] / a[1] for a, b in zip(values, first, strict=True)]),
        ("CPU-seconds", [a[0] / b[0] for a, b in zip(values, first, strict=True)]),
    ):
        low, middle, high = statistics.quantiles(ratios, n=4)
        found.append(f"{name} {middle:.3f} ({low:.3f}..{high:.3f})")
    return f"; of the first's {', '.join(found)}"


if __name__ == "__main__":
    main()
