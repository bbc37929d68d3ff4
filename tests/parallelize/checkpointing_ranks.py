"""What each rank runs in test_activation_checkpointing.py: models whose blocks are called in many ways, and what a step calls."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.instruments.traffic import counted
from lightning_sp.parallelize import block_checkpoints
from lightning_sp.step import prepare
from tests.instruments.kernel_calls import kernel_calls
from tests.instruments.told import told
from tests.trainer.tiny import MODELS, VOCAB, HuggingFaceLlama, Plain, TokenDataset, _full, quiet_trainer


class CrossBlock(nn.Module):
    """Attention to itself and to another sequence; takes keywords, returns a tuple, drops."""

    def __init__(self, crosses: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.crosses = nn.LayerNorm(32), nn.Linear(32, 96), crosses
        self.mlp = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Dropout(0.2), nn.Linear(48, 32))

    def forward(self, x: Tensor, *, memory: Tensor | None = None, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        if self.crosses:
            assert memory is not None
            k, v = (memory.unflatten(-1, (4, 8)).transpose(1, 2) for _ in range(2))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=not self.crosses)
        x = x + scale * out.transpose(1, 2).flatten(2)
        return x + self.mlp(x), x.square().mean(-1)


class CrossModel(nn.Module):
    """Blocks that attend to themselves, then some that attend to what these gave."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.first = nn.ModuleList(CrossBlock(False) for _ in range(2))
        self.second = nn.ModuleList(CrossBlock(True) for _ in range(2))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.first:
            x, size = block(x, scale=0.5)
        memory = x
        for block in self.second:
            x, _ = block(x, memory=memory)
        return self.head(x) * (1 + size[..., None])


def checkpointed_by_itself() -> HuggingFaceLlama:
    """As its user would: before the Trainer gets it."""
    model = HuggingFaceLlama()
    model.inner.gradient_checkpointing_enable()
    return model


def compiled_blocks() -> nn.Module:
    """A Llama whose blocks its user compiled, the graphs those of Inductor, run eagerly."""
    model = MODELS["llama"]()
    for block in next(each for each in model.modules() if isinstance(each, nn.ModuleList)):
        block.compile(backend="aot_eager")
    return model  # type: ignore[no-any-return]


BUILDS: dict[str, Any] = {
    **MODELS,
    "cross": CrossModel,
    "compiled": compiled_blocks,
    "hugging face, checkpointed": checkpointed_by_itself,
}


class Counted(Plain):
    """Counts what its first step calls: kernels of the attention, all-to-alls and messages of the ring."""

    def __init__(self, build: Any, late: bool) -> None:
        super().__init__(build)
        self.late = late

    def on_fit_start(self) -> None:
        if self.late:
            self.model.inner.gradient_checkpointing_enable()


def steps(
    build: str,
    world: int,
    strategy: dict[str, Any],
    late: bool = False,
    data: dict[str, Any] | None = None,
    backend: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Fit for a step or more; return losses, gradients, calls of the whole fit, and how the blocks recompute themselves."""
    torch.manual_seed(3)
    module = Counted(BUILDS[build], late)
    trainer = quiet_trainer(world, strategy={"preflight": False, **strategy}, **{"max_steps": 2, **options})
    compiling = patch.object(prepare, "COMPILE_BACKEND", backend or prepare.COMPILE_BACKEND)
    torch.compiler.reset()
    with compiling, kernel_calls() as kernels, counted() as traffic, told() as lines:
        trainer.fit(module, DataLoader(TokenDataset(**(data or {"size": 4})), batch_size=2))
    return {
        "losses": module.losses,
        "grads": module.raw_grads,
        "weights": {n: _full(p.detach()).clone() for n, p in module.named_parameters()},
        "kernels": len(kernels),
        "exchanges": traffic.calls["all_to_all_single"],
        "of_block": block_checkpoints(module).of_block,
        "told": [line for line in lines if "gradient checkpointing" in line],
    }


def all_steps(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run several fits in one call."""
    return [steps(**case) for case in cases]
