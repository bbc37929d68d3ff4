"""What each checkpoint policy costs in compiled blocks, and what it keeps: CPU-seconds of a step over those of "none", and bytes of a block.

`OMP_NUM_THREADS=1 python -m benchmarks.memory.compiled_policies --tokens 768`: blocks of this package's Llama (dim 512, hidden 1408, 8 heads),
float32, one process of one thread, Inductor. Steps of all policies in drawn orders; ratios are those of one round. The first step of each
compiles, and its gradients are held against those of "none".
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from lightning_sp.attention import AttentionMask, sequence_parallel_attention
from lightning_sp.mesh import SequenceMesh, build_device_mesh
from lightning_sp.models import LlamaConfig
from lightning_sp.models.llama import Block, rotary_angles
from lightning_sp.parallelize import checkpoint_blocks

POLICIES = ("none", "budget_75", "budget_50", "budget_40", "budget_25", "budget_10", "matmuls", "selective")


def attention(mesh: SequenceMesh) -> Callable[..., Tensor]:
    """Return the operator in place of torch's function, as the strategy has it."""

    def of(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        return sequence_parallel_attention(q, k, v, mesh=mesh, mask=AttentionMask(causal=True))

    return of


def blocks_under(policy: str, num_blocks: int, config: LlamaConfig) -> nn.ModuleList:
    """Return blocks, alike for all policies, compiled to recompute themselves so."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(config) for _ in range(num_blocks))
    checkpoints = checkpoint_blocks(blocks, list(blocks), policy, measures=False, backend="inductor")
    for block in blocks:
        block.compile(backend=checkpoints.compile_block)
    return blocks


def step(blocks: nn.ModuleList, x: Tensor, angles: Sequence[Tensor]) -> tuple[float, int, Tensor]:
    """Return the CPU-seconds of a step, the bytes that blocks saved beside weights and angles, and all gradients in one tensor."""
    kept: dict[int, int] = {}
    others = {each.untyped_storage()._cdata for each in (*blocks.parameters(), *angles)}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in others:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    begin = time.process_time()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out: Any = x.clone().requires_grad_()
        for block in blocks:
            out = block(out, *angles)
    out.square().mean().backward()
    seconds = time.process_time() - begin
    gradients = torch.cat([each.grad.flatten() for each in blocks.parameters() if each.grad is not None])
    blocks.zero_grad()
    return seconds, sum(kept.values()), gradients


def main() -> None:
    """Print a row for each policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=768)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    torch._dynamo.config.recompile_limit = 2 * len(POLICIES)  # all policies are one function of one process here
    config = LlamaConfig(vocab_size=512, dim=512, num_layers=1, num_heads=8, num_kv_heads=8, hidden_dim=1408)
    angles = rotary_angles(torch.arange(given.tokens)[None], head_dim=config.head_dim, theta=1e4, dtype=torch.float32)
    x = torch.randn(1, given.tokens, config.dim)
    folder = tempfile.mkdtemp()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    F.scaled_dot_product_attention = attention(
        SequenceMesh.build(
            build_device_mesh("cpu", data_parallel_size=1, sequence_parallel_size=1), ring_size=1, ulysses_size=1
        )
    )
    models = {policy: blocks_under(policy, given.blocks, config) for policy in POLICIES}
    first = {policy: step(models[policy], x, angles) for policy in tqdm(POLICIES, desc="compiling")}
    seconds: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for _ in tqdm(range(given.rounds), desc="rounds"):
        for policy in random.sample(POLICIES, len(POLICIES)):
            seconds[policy].append(step(models[policy], x, angles)[0])
    _, whole, gradients = first["none"]
    print(
        f"{given.tokens} tokens: policy, CPU s of a step, over none (quartiles), MiB of a block, of none's, error of gradients"
    )
    for policy in POLICIES:
        _, kept, found = first[policy]
        ratios = [a / b - 1 for a, b in zip(seconds[policy], seconds["none"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        error = float((found - gradients).abs().max() / gradients.abs().max())
        print(
            f"{policy:10} {statistics.median(seconds[policy]):7.3f} {middle:+7.1%} ({low:+.1%}..{high:+.1%}) "
            f"{kept / given.blocks / 2**20:7.2f} {kept / whole:6.2f} {error:9.1e}"
        )


if __name__ == "__main__":
    main()
