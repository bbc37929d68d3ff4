"""The longest sequence on paper: the formulas by which activation_checkpointing="auto" chooses, for devices that are not here.

    python -m benchmarks.longest_on_paper             Llama 3 8B on 8 devices of 80 GB, and the small Llama of `longest_sequence` beside it

What a block leaves is measured here: one block of the model's shape takes a step on 2 ranks by this project's strategy, whose heads go in stages
that are made again. A token leaves the same whatever the step's length and however many blocks there are. What a rank holds follows from the
parameters' shapes, sharded over all ranks. The small Llama, predicted so for 2 ranks, is the check: `benchmarks.longest_sequence` measures it.

The formulas are those of docs/memory.md. They leave out buffers of messages and an allocator's gaps; of a device nine tenths are filled, as by
default, and 2 GiB of that are left to CUDA and NCCL.
"""

from __future__ import annotations

import logging
import sys
import warnings
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_sp import SequenceParallelStrategy
from lightning_sp.loss.output_head.chunked_head import chunk_bytes
from lightning_sp.parallelize import block_checkpoints, transformer_blocks
from lightning_sp.parallelize.memory.memory_prediction import LEAST, ModelBytes, StepBytes, moments
from lightning_sp.parallelize.memory.model_bytes import model_bytes
from lightning_sp.testing import RankPool

GIB, MIB = 2**30, 2**20
HORIZON = 2
# Of the block that is measured: a head of few words is as good, for its logits come in chunks.
WORDS = 2048
NAMES = {
    "selective": "selective", "full": "full", "full_tiled": "full, tiled MLPs and norms",
    "full_offloaded": f"full, tiled, inputs on the host, horizon {HORIZON}",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model and where it is trained.

    Args:
        title: of the table.
        shape: of the model.
        precision: of the Trainer.
        stages: of heads.
        tokens: of the step in which a block is measured.
        world: ranks.
        budget: bytes of each.
        reserved: of them, for others.
        device: what kind the ranks' devices are.
    """

    title: str
    shape: dict[str, int]
    precision: str
    stages: int
    tokens: int
    world: int
    budget: float
    reserved: int = 0
    device: str = "cpu"


SMALL = dict(
    vocab_size=32_000, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=8,
)  # fmt: skip
LARGE = dict(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8,
)  # fmt: skip
ON_GPUS = dict(world=8, budget=0.9 * 80e9, reserved=2 * GIB, device="cuda", tokens=256)
CASES = (
    Case("The small Llama, float32, 2 ranks of 3 GiB, 1 stage", SMALL, "32-true", 1, 1024, world=2, budget=3.0 * GIB),
    Case("The small Llama, float32, 2 ranks of 3 GiB, 4 stages", SMALL, "32-true", 4, 1024, world=2, budget=3.0 * GIB),
    Case("Llama 3 8B, bfloat16, AdamW's state too, 8 devices of 80 GB, 4 stages", LARGE, "bf16-true", 4, **ON_GPUS),  # type: ignore[arg-type]
    Case("Llama 3 8B, bf16-mixed, float32 weights, 8 devices of 80 GB, 4 stages", LARGE, "bf16-mixed", 4, **ON_GPUS),  # type: ignore[arg-type]
)


class _OneBlock(pl.LightningModule):
    """One block of the shape, with its embedding and head."""

    def __init__(self, shape: dict[str, int]) -> None:
        super().__init__()
        self.shape = shape
        self.left: StepBytes | None = None

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = LlamaForCausalLM(LlamaConfig(**{**self.shape, "num_hidden_layers": 1, "vocab_size": WORDS}))  # type: ignore[arg-type]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.left = block_checkpoints(self).activations.step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def left_by_a_block(shape: dict[str, int], precision: str, stages: int, tokens: int) -> StepBytes:
    """Return what a step leaves with one block, on one of the two ranks that run this."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    ids = torch.randint(0, WORDS, (tokens,))
    options: Any = dict(ulysses_stages=stages, stage_inputs="recomputed") if stages > 1 else {}
    trainer = pl.Trainer(
        strategy=SequenceParallelStrategy(preflight=False, ulysses_size=2, memory_budget_gib=1000.0, **options), accelerator="cpu",
        devices=2, max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        precision=precision,  # type: ignore[arg-type]
    )  # fmt: skip
    module = _OneBlock(shape)
    trainer.fit(module, DataLoader([{"input_ids": ids, "labels": ids}], batch_size=1))  # type: ignore[arg-type]
    assert module.left is not None
    return module.left


def held(case: Case) -> ModelBytes:
    """Return what a rank holds of the whole model, by its shapes."""
    dtype = torch.bfloat16 if case.precision == "bf16-true" else torch.float32
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**case.shape)).to(dtype)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters())
    whole = model_bytes(model, transformer_blocks(model), [optimizer], torch.device("cpu"))
    parameters = sum(each.nbytes for each in model.parameters())
    loss = chunk_bytes(case.shape["vocab_size"], "auto", sys.maxsize, torch.device(case.device))
    return replace(
        whole, base=case.reserved + parameters // case.world, gradients=whole.gradients // case.world,
        optimizer=whole.optimizer // case.world, loss=loss,
    )  # fmt: skip


def table(case: Case, left: StepBytes) -> None:
    """Print a row for each policy."""
    layers, model = case.shape["num_hidden_layers"], held(case)
    step = replace(left, blocks=left.blocks * layers).offering(tiles=[True] * layers, horizon=HORIZON)
    print(f"\n{case.title}: {model.base / MIB:,.0f} MiB stay, {model.optimizer / MIB:,.0f} of the optimizer\n")
    print("| | at no token, MiB | KiB a token of the sequence | longest, tokens | inputs away, GiB a rank |")
    print("| --- | --- | --- | --- | --- |")
    for policy in LEAST:
        each = moments(policy, step, model)
        longest, at = min(((case.budget - moment.fixed) / moment.per_token, moment.fixed) for moment in each)
        per_token = max(moment.per_token for moment in each if moment.fixed == at)
        block = step.blocks[0]
        assert block is not None
        away = block.inputs * layers / step.tokens * longest / GIB if policy == "full_offloaded" else 0
        print(
            f"| {NAMES[policy]} | {at / MIB:,.0f} | {per_token / case.world / 1024:.1f} | {max(0, int(longest)) * case.world:,} | "
            f"{f'{away:.0f}' if away else '-'} |",
            flush=True,
        )


def main() -> None:
    with RankPool(2) as pool:
        for case in CASES:
            left: Any = pool.run(left_by_a_block, case.shape, case.precision, case.stages, case.tokens)
            table(case, left[0])


if __name__ == "__main__":
    main()
