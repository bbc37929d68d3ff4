"""What each rank runs in test_auto_checkpointing.py: fits within a machine that has a little more than what is resident."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_sp.config import StrategyConfig
from lightning_sp.errors import SequenceParallelError
from lightning_sp.loss.output_head.deferred_heads import defers_logits
from lightning_sp.models import Llama, LlamaConfig
from lightning_sp.parallelize import block_checkpoints
from lightning_sp.parallelize.memory.memory_budget import used_bytes
from lightning_sp.parallelize.memory.memory_prediction import CANDIDATES, bytes_per_token, cast_bytes, cheapest_policy
from lightning_sp.parallelize.memory.model_bytes import step_of_shapes
from lightning_sp.step import auto_checkpointing, prepare
from lightning_sp.step.auto_checkpointing import AutoCheckpointing
from tests.instruments.told import told
from tests.trainer.tiny import VOCAB, Plain, quiet_trainer

# 16.6 KiB for each token and layer: 136 MiB at 1,024 tokens of a rank.
WIDE = partial(Llama, LlamaConfig(vocab_size=VOCAB, dim=64, num_layers=8, num_heads=4, num_kv_heads=4, hidden_dim=1024))

# As wide for its heads as those that people train.
USUAL = partial(
    Llama, LlamaConfig(vocab_size=VOCAB, dim=256, num_layers=2, num_heads=8, num_kv_heads=2, hidden_dim=896)
)


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
        self.policies: list[str] = []
        self.deferring: list[bool] = []

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.of_blocks.append(list(block_checkpoints(self).of_block))
        self.policies.append(block_checkpoints(self).policy)
        self.deferring.append(defers_logits(self))


@contextlib.contextmanager
def machine_of(mib: float | None) -> Iterator[None]:
    """Let `memory_budget_gib="auto"` find a machine with this much memory above what is resident then."""
    if mib is None:
        yield
        return
    with patch.object(auto_checkpointing, "budget_bytes", lambda device, _: used_bytes(device) + int(mib * 2**20)):
        yield


# Its inputs are larger than the gradients of its weights, and more so what is wide in its MLPs.
TILED = partial(Llama, LlamaConfig(vocab_size=VOCAB, dim=64, num_layers=3, num_heads=4, num_kv_heads=4, hidden_dim=256))


@contextlib.contextmanager
def budget_between(policies: tuple[str, str] | None, first: int) -> Iterator[None]:
    """Let all choices from one on, the second say, find a budget in the middle of what two policies need."""
    if policies is None:
        yield
        return
    looked_at: list[Sequence[int]] = []

    def chosen(candidates: Sequence[str], peaks: Sequence[int], budget: int) -> str | None:
        looked_at.append(peaks)
        needed = [peaks[candidates.index(each)] for each in policies]
        return cheapest_policy(candidates, peaks, sum(needed) // 2 if len(looked_at) >= first else budget)

    with patch.object(auto_checkpointing, "cheapest_policy", chosen):
        yield


def budgeted(
    world: int,
    lengths: list[int],
    strategy: dict[str, Any],
    machine_mib: float | None = None,
    between: tuple[str, str] | None = None,
    build: Any = WIDE,
    precision: Any = "32-true",
    backend: str = "inductor",
    first: int = 2,
) -> dict[str, Any]:
    """Fit one step for each length.

    Args:
        world: ranks.
        lengths: of each step's row.
        strategy: its options.
        machine_mib: of the machine's memory, above what is resident when a policy is chosen: how much that is depends on what ran before in this
            process. None for this machine's.
        between: policies, for `budget_between`.
        build: makes the model.
        precision: of the Trainer.
        backend: of what is compiled.
        first: choice to which `between` applies.
    """
    torch.manual_seed(3)
    module = Followed(build)
    gc.collect()
    trainer = quiet_trainer(world, strategy=strategy, precision=precision)
    answer: dict[str, Any] = {"error": ""}
    compiling = patch.object(prepare, "COMPILE_BACKEND", backend)
    with told() as lines, machine_of(machine_mib), budget_between(between, first), compiling:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, DataLoader(Rows(lengths), batch_size=1))
        except SequenceParallelError as error:
            answer["error"] = str(error)
    checkpoints = block_checkpoints(module)
    step, shapes = (
        checkpoints.activations.step,
        step_of_shapes(module, checkpoints.blocks, precision, checkpoints.tiles),
    )
    estimated = AutoCheckpointing(StrategyConfig())._estimated(module, checkpoints)
    answer |= {
        "losses": module.losses,
        "grads": module.raw_grads,
        "of_blocks": module.of_blocks,
        "told": [line for line in lines if "from this step on" in line or "are predicted" in line],
        "policies": module.policies,
        "casts": step and [cast_bytes(policy, step) for policy in CANDIDATES],
        "estimated": step
        and [b.kept * step.tokens / a.kept for a, b in zip(step.blocks, shapes.blocks, strict=True) if a and b],
        "estimated_tiled": step
        and [
            b.computed("full_tiled") * step.tokens / a.computed("full_tiled")
            for a, b in zip(step.blocks, shapes.blocks, strict=True)
            if a and b
        ],
        "deferring": module.deferring,
        "estimated_outside": (shapes.outside, estimated.outside),
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
