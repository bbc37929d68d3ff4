"""What the ranks of test_behind_runs run; as a script a rank that reads a number alone."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.trainer.tiny import TokenDataset, plain_trainer, quiet_trainer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (2, 16)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class User(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(61, 32), nn.Linear(32, 61)
        self.blocks = nn.Sequential(Block(), Block())

    def logits(self, ids: torch.Tensor) -> Any:
        return self.head(self.blocks(self.embedding(ids)))

    def forward(self, ids: torch.Tensor) -> Any:
        return self.logits(ids)

    def training_step(self, batch: Any) -> Any:
        return F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["shift_labels"].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fitted(**strategy: Any) -> User:
    torch.manual_seed(0)
    module = User().double()
    quiet_trainer(2, strategy={"ring_size": 2, **strategy}, max_steps=1, max_epochs=1).fit(
        module, DataLoader(TokenDataset(4), batch_size=2)
    )
    return module


def read_behind_a_fit() -> dict[str, Any]:
    """Return numbers of a weight, each beside the whole's, what is written to it, and logits of a method of the user's."""
    module, ids = fitted(), torch.arange(20).view(2, 10)
    with torch.no_grad():
        logits = module.logits(ids)
    try:
        module.logits(ids)
        refused = ""
    except Exception as error:
        refused = str(error)
    same = torch.allclose(logits, module(ids), rtol=1e-12)
    module.zero_grad()
    weight: Any = module.head.weight
    whole = weight.full_tensor()
    numbers = {
        "norm": (float(weight.norm()), float(whole.norm())),
        "sum": (weight.sum().item(), whole.sum().item()),
        "max": (float(weight.max()), float(whole.max())),
        "format": (float(f"{weight.norm():.16e}"), float(whole.norm())),
        "numpy": (weight.detach().numpy().sum(), whole.sum().item()),
        "row": (weight.tolist()[60][0], whole[60, 0].item()),
    }
    weight.data[0].zero_()
    weight.data[60] = 2.0
    now = weight.full_tensor()
    return {
        "numbers": numbers,
        "written": [now[0].abs().max().item(), now[60].mean().item()],
        "same logits": same,
        "refused with gradients": refused,
    }


if __name__ == "__main__":
    trained = fitted(hang_s=2)
    if sys.argv[1] == "trainer":
        if trained.global_rank == 0:
            plain_trainer().predict(trained, DataLoader(TokenDataset(4), batch_size=2))
        else:
            time.sleep(10)
    elif trained.global_rank == 0:
        print(float(trained.head.weight.norm()) if sys.argv[1] == "number" else trained(torch.arange(20).view(2, 10)))
