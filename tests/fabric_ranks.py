"""What the ranks of test_fabric_example run."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, DistributedSampler

from examples.fabric import build, train
from lightning_sp.config import StrategyConfig


def example(world: int, ring_size: int, data_parallel_size: int) -> list[float]:
    """Return the losses of the example's loop, on the ranks that already run."""
    fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp")
    fabric.launch()
    return train(fabric, StrategyConfig(ring_size=ring_size, data_parallel_size=data_parallel_size), 5)


def plain() -> list[float]:
    """Return those of a plain loop of transformers and torch."""
    torch.manual_seed(0)
    model, tokens = build()
    loader = DataLoader(tokens, batch_size=4, sampler=DistributedSampler(tokens, 1, 0))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for input_ids, _ in zip(loader, range(5), strict=False):
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
