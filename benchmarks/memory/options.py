"""Peak memory and time of a step on 2 CPU ranks, by option: `python -m benchmarks.memory.options`.

A Llama of 50M parameters in float32 (8 layers, dim 512, vocabulary 32K, head of its own), with one sequence on each rank. What is alive before
the step (shards of parameters and gradients) does not count.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from benchmarks.instruments.resident import peak_growth
from lightning_sp.config import MemoryOptions
from lightning_sp.models import Llama, LlamaConfig
from lightning_sp.models.llama import rotary_angles
from lightning_sp.parallelize import (
    checkpoint_blocks,
    make_fsdp_root,
    offload_activations,
    shard_model,
    transformer_blocks,
)
from lightning_sp.testing import RankPool

VOCAB, CHUNK = 32_000, 256
CHECKPOINTED = dict(activation_checkpointing=True)
DISK = dict(CHECKPOINTED, activation_offload="disk")
CASES: dict[str, dict[str, Any]] = {
    "embedding and head in the model's unit": dict(as_one=True),
    "units of their own": {},
    "reshard_after_forward=False": dict(reshard_after_forward=False),
    "checkpointed": CHECKPOINTED,
    "checkpointed, horizon 4": dict(DISK, activation_loading_horizon=4),
    "checkpointed, horizon 2": dict(DISK, activation_loading_horizon=2),
    "checkpointed, horizon 1": dict(DISK, activation_loading_horizon=1),
}


class _Step(nn.Module):
    """A head without logits of the whole sequence, so that it is not the logits that are measured."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        config = LlamaConfig(vocab_size=VOCAB, dim=512, num_layers=layers, num_heads=8, num_kv_heads=8, hidden_dim=1408)
        self.model = _Chunked(config)

    def training_step(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(ids)
        return loss


class _Chunked(Llama):
    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        places = torch.arange(ids.shape[1]).expand_as(ids) if position_ids is None else position_ids
        cos, sin = rotary_angles(
            places, head_dim=self.config.head_dim, theta=self.config.rope_theta, dtype=torch.float32
        )
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        parts = zip(self.norm(x).flatten(0, 1).split(CHUNK), ids.flatten().split(CHUNK), strict=True)
        losses = [checkpoint(self.part, *each, use_reentrant=False) for each in parts]
        return torch.stack(losses).sum() / ids.numel()

    def part(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return a part's sum of cross entropies."""
        return F.cross_entropy(self.head(hidden), ids, reduction="sum")


def measured(case: str, layers: int, tokens: int, steps: int) -> tuple[float, float]:
    """Return the most MiB of a step, and its least seconds."""
    options = dict(CASES[case])
    as_one = options.pop("as_one", False)
    chosen = MemoryOptions(**options)
    torch.manual_seed(0)
    root = _Step(layers)
    blocks = transformer_blocks(root)
    offload = offload_activations(root, chosen, torch.device("cpu"), blocks)
    if chosen.activation_checkpointing:
        checkpoint_blocks(root, blocks, "selective", offload=offload)
    found = mock.patch("lightning_sp.parallelize.fsdp.shard_model.vocabulary_layers", return_value=[])
    with found if as_one else nullcontext():
        shard_model(root, blocks, init_device_mesh("cpu", (torch.distributed.get_world_size(),)), chosen)
    make_fsdp_root(root)
    ids = torch.randint(0, VOCAB, (1, tokens))
    root.training_step(ids[:, :CHUNK]).backward()  # type: ignore[no-untyped-call]
    peaks, seconds = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        with peak_growth() as growth:
            root.training_step(ids).backward()  # type: ignore[no-untyped-call]
        seconds.append(time.perf_counter() - begin)
        peaks.append(growth.peak_bytes / 2**20)
    if offload is not None:
        offload.close()
    return max(peaks), min(seconds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    print("| case | " + " | ".join(f"MiB, s at {tokens} tokens a rank" for tokens in given.tokens) + " |")
    print("|---|" + "---|" * len(given.tokens))
    for case in CASES:
        cells = []
        for tokens in given.tokens:
            with RankPool(2, timeout_s=900.0) as pool:
                answers = pool.run(measured, case, given.layers, tokens, given.steps)
            cells.append(f"{max(peak for peak, _ in answers):.0f}, {max(s for _, s in answers):.2f}")
        print(f"| {case} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
