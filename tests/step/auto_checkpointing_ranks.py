"""What each rank runs in test_auto_checkpointing.py: fits whose budget is a little more than what is resident."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_sp.errors import SequenceParallelError
from lightning_sp.models import Llama, LlamaConfig
from lightning_sp.parallelize import block_checkpoints
from lightning_sp.parallelize.memory_budget import used_bytes
from lightning_sp.parallelize.memory_prediction import CANDIDATES, GIB, bytes_per_token
from tests.told import told
from tests.trainer.tiny import VOCAB, Plain, quiet_trainer

# 16.6 KiB for each token and layer: 272 MiB at 2,048 tokens of a rank.
WIDE = partial(Llama, LlamaConfig(vocab_size=VOCAB, dim=64, num_layers=8, num_heads=4, num_kv_heads=4, hidden_dim=1024))


class Rows(Dataset[dict[str, torch.Tensor]]):
    """A row of each length."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(0, VOCAB, (self.lengths[index],), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "shift_labels": row.roll(-1), "position_ids": torch.arange(len(row))}


class Followed(Plain):
    """Notes how its blocks recompute themselves in each step."""

    def __init__(self, build: Any) -> None:
        super().__init__(build)
        self.of_blocks: list[list[str]] = []

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.of_blocks.append(list(block_checkpoints(self).of_block))


def budgeted(
    world: int, lengths: list[int], extra_mib: float | None, strategy: dict[str, Any], build: Any = WIDE
) -> dict[str, Any]:
    """Fit one step for each length.

    Args:
        world: ranks.
        lengths: of each step's row.
        extra_mib: of the budget, above what is resident; None for the budget that is chosen.
        strategy: its other options.
        build: makes the model.
    """
    torch.manual_seed(3)
    module = Followed(build)
    gc.collect()
    if extra_mib is not None:
        strategy = {**strategy, "memory_budget_gib": (used_bytes(torch.device("cpu")) + extra_mib * 2**20) / GIB}
    trainer = quiet_trainer(world, strategy=strategy, precision="32-true")
    answer: dict[str, Any] = {"error": ""}
    with told() as lines:
        try:
            trainer.fit(module, DataLoader(Rows(lengths), batch_size=1))
        except SequenceParallelError as error:
            answer["error"] = str(error)
    step = block_checkpoints(module).activations.step
    answer |= {
        "losses": module.losses,
        "grads": module.raw_grads,
        "of_blocks": module.of_blocks,
        "told": [line for line in lines if "from this step on" in line or "are predicted" in line],
        "measured": step and (step.tokens, [bytes_per_token(policy, step) for policy in CANDIDATES]),
    }
    return answer


def all_budgeted(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run several fits in one call."""
    return [budgeted(**case) for case in cases]


class OwnDerivative(Llama):
    """A model that takes a derivative by torch.func, which allows no hooks of saved tensors."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits = super().forward(*args, **kwargs)
        scale = torch.func.grad(lambda x: (x * x).sum())(torch.ones(1, dtype=logits.dtype))
        return logits * scale


def small(kind: type[Llama]) -> Llama:
    """Return a model of one layer."""
    return kind(LlamaConfig(vocab_size=VOCAB, dim=32, num_layers=1, num_heads=4, num_kv_heads=4, hidden_dim=48))
