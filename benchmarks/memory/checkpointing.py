"""Peak memory and CPU seconds of a step under each checkpoint policy, beside the peak that "auto" would predict.

`OMP_NUM_THREADS=1 python -m benchmarks.memory.checkpointing --tokens 2048`: a Llama (dim 512, 8 layers, hidden 1408, vocabulary 4,096).
Of the last policy inputs leave to a file. Policies are interleaved, in one process for each rank. The first step of a policy makes gradients
and the optimizer's state, or its code with `--compile`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks.instruments.resident import map_tensors, peak_growth
from lightning_sp import SequenceParallelStrategy
from lightning_sp.models import Llama, LlamaConfig
from lightning_sp.parallelize import block_checkpoints
from lightning_sp.parallelize.memory.memory_prediction import CANDIDATES, OF_COMPILED, peak_bytes
from lightning_sp.parallelize.memory.model_bytes import model_bytes, step_of_shapes
from lightning_sp.testing import RankPool

MIB = 2**20


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens, alike on all ranks."""

    def __init__(self, num_rows: int, length: int, vocabulary: int) -> None:
        self.tokens = torch.randint(0, vocabulary, (num_rows, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.tokens[index]
        return {"input_ids": row, "shift_labels": row.roll(-1), "position_ids": torch.arange(len(row))}


class Measured(pl.LightningModule):
    """Steps of one policy after the other; notes the peak above what is resident before a step but for gradients, and the seconds."""

    def __init__(self, model: LlamaConfig, policies: tuple[str, ...], tokens: int) -> None:
        super().__init__()
        self.config, self.policies, self.tokens = model, policies, tokens  # of a rank: a hook is shown whole sequences
        self.peaks: dict[str, list[int]] = {policy: [] for policy in policies}
        self.seconds: dict[str, list[float]] = {policy: [] for policy in policies}
        self.predicted: dict[str, int] = {}
        self.growth: Any = None
        self.gradients = 0

    def configure_model(self) -> None:
        self.model = Llama(self.config)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if batch_idx:  # behind the choice of "auto", which this replaces
            block_checkpoints(self).use(self.policies[batch_idx % len(self.policies)])
        logits = self.model(batch["input_ids"], batch["position_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def on_train_batch_start(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        checkpoints = block_checkpoints(self)
        # Those of the step before are freed within this one: they are in what is resident before it, and no prediction's base.
        there: list[Any] = [each.grad for each in self.parameters() if each.grad is not None]
        self.gradients = sum(each.to_local().nbytes for each in there)
        if batch_idx == 1:  # the first step was measured, and has made the optimizer's state
            measured = checkpoints.activations.step  # compiled code is not measured
            step = measured or step_of_shapes(self, checkpoints.blocks, self.trainer.precision, checkpoints.tiles)
            step = step.offering(tiles=checkpoints.can_tile(sees_whole=False), horizon=checkpoints.horizon)
            optimizers = self.trainer.optimizers
            model = model_bytes(self, checkpoints.blocks, optimizers, torch.device("cpu"))
            for policy in self.policies:
                if policy == "matmuls":  # which "auto" never takes
                    continue
                self.predicted[policy] = peak_bytes(policy, step, model, self.tokens) - model.base
        if batch_idx:
            self._block = peak_growth()
            self.growth, self.begin = self._block.__enter__(), time.process_time()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            policy = self.policies[batch_idx % len(self.policies)]
            self.seconds[policy].append(time.process_time() - self.begin)
            self._block.__exit__(None, None, None)
            self.peaks[policy].append(self.growth.peak_bytes + self.gradients)


def measure(
    degrees: dict[str, int],
    tokens: int,
    rounds: int,
    config: LlamaConfig,
    precision: Any = "32-true",
    policies: Sequence[str] = CANDIDATES,
    compiled: bool = False,
) -> dict[str, tuple[int, int, float]]:
    """Return of each policy the predicted and the measured peak above what is resident but for gradients, in bytes, and CPU seconds of a step.

    Args:
        degrees: options of the strategy.
        tokens: of a rank.
        rounds: steps of each policy.
        config: of the Llama.
        precision: of the Trainer.
        policies: that are measured.
        compiled: whether blocks are.
    """
    map_tensors()
    world = int(os.environ["WORLD_SIZE"])
    module = Measured(config, tuple(policies), tokens)
    strategy = SequenceParallelStrategy(
        **degrees,  # type: ignore[arg-type]
        preflight=False,
        activation_checkpointing="auto",
        memory_budget_gib=1e6,
        offload_folder=None if compiled else tempfile.gettempdir(),
        compile=compiled,
    )
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=world, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, precision=precision,
    )  # fmt: skip
    warming = int(compiled)
    trainer.fit(module, DataLoader(Rows(1 + (rounds + warming) * len(policies), tokens * world, config.vocab_size)))
    return {
        policy: (
            module.predicted.get(policy, 0),
            max(module.peaks[policy][warming:]),
            statistics.median(module.seconds[policy][warming:]),
        )
        for policy in policies
    }


def main() -> None:
    """Print a row for each policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--precision", default="32-true", help="of the Trainer")
    parser.add_argument("--ring", action="store_true", help="a ring in place of Ulysses")
    parser.add_argument("--compile", action="store_true", help="blocks by torch.compile")
    parser.add_argument("--policies", nargs="+", default=(), metavar="POLICY", help="those of auto, unless given")
    given = parser.parse_args()
    policies = given.policies or (OF_COMPILED if given.compile else CANDIDATES)
    config = LlamaConfig(
        vocab_size=given.vocabulary, dim=512, num_layers=8, num_heads=8, num_kv_heads=8, hidden_dim=1408
    )
    degrees = {} if given.ranks == 1 else {"ring_size" if given.ring else "ulysses_size": given.ranks}
    with RankPool(given.ranks, timeout_s=3600) as pool:
        ranks = pool.run(measure, degrees, given.tokens, given.rounds, config, given.precision, policies, given.compile)
    print(
        f"{given.ranks} ranks, {given.precision}, {given.tokens} tokens a rank: policy, predicted MiB, measured MiB, predicted/measured, "
        "CPU s of a rank's step"
    )
    for policy in policies:
        predicted, peak = (max(rank[policy][i] for rank in ranks) for i in (0, 1))
        seconds = statistics.mean(rank[policy][2] for rank in ranks)
        print(f"{policy:14} {predicted / MIB:8.1f} {peak / MIB:8.1f} {predicted / peak:6.2f} {seconds:8.3f}")


if __name__ == "__main__":
    main()
