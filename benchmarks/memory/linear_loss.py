"""The loss of a head over a large vocabulary, forward and backward: with logits, in our chunks, and by torch's own chunked function.

    python -m benchmarks.memory.linear_loss --tokens 2048 --dim 512 --vocabulary 32000

CPU-seconds and peak memory of this process, each way in turn, `--rounds` times; the median of each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.instruments.resident import peak_growth
from lightning_sp import linear_cross_entropy

Way = Callable[[Tensor, nn.Linear, Tensor], Tensor]


def with_logits(hidden: Tensor, head: nn.Linear, target: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).float(), target)


def by_torch(chunk: int, hidden: Tensor, head: nn.Linear, target: Tensor) -> Tensor:
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
    return F.linear_cross_entropy(hidden, head.weight, target, options=options)


def ways(chunks: list[int]) -> dict[str, Way]:
    found: dict[str, Way] = {"logits": with_logits}
    for chunk in chunks:
        found[f"ours, {chunk} tokens"] = partial(_ours, chunk)
        if hasattr(nn, "LinearCrossEntropyOptions"):
            found[f"torch, {chunk} tokens"] = partial(by_torch, chunk)
    return found


def _ours(chunk: int, hidden: Tensor, head: nn.Linear, target: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, head, target, chunk_tokens=chunk)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("tokens", 2048), ("dim", 512), ("vocabulary", 32000), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    torch.manual_seed(0)
    dtype = getattr(torch, given.dtype)
    head = nn.Linear(given.dim, given.vocabulary, bias=False, dtype=dtype)
    hidden = torch.randn(given.tokens, given.dim, dtype=dtype, requires_grad=True)
    target = torch.randint(0, given.vocabulary, (given.tokens,))
    spent: dict[str, list[tuple[float, float]]] = {}
    for _ in range(given.rounds):
        for name, way in ways(given.chunks).items():
            hidden.grad = head.weight.grad = None
            with peak_growth() as growth:
                start = time.process_time()
                way(hidden, head, target).backward()
                seconds = time.process_time() - start
            spent.setdefault(name, []).append((seconds, growth.peak_bytes / 2**20))
    for name, values in spent.items():
        seconds, mib = (statistics.median(each) for each in zip(*values, strict=True))
        print(f"{name:20} {seconds:7.3f} CPU-s {mib:8.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
