"""What the examples of losses share: a small model, random rows of tokens, a Trainer for two CPU processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_sp.models import LlamaConfig

VOCAB = 64


def model(dim: int = 32, num_layers: int = 2) -> nn.Module:
    """A decoder of (B, S) tokens and positions -> (B, S, VOCAB) logits."""
    config = LlamaConfig(vocab_size=VOCAB, dim=dim, num_layers=num_layers, num_heads=4, num_kv_heads=2, hidden_dim=48)
    return config.build()


class Rows(Dataset[dict[str, Tensor]]):
    """Samples of random tokens; a sample is one row, or two that belong together."""

    def __init__(self, size: int = 12, length: int = 30, rows: int = 1) -> None:
        g = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(1, VOCAB, (size, rows, length + 1), generator=g)
        # The prompt is not learned; behind the answer there is padding.
        self.prompts = torch.randint(1, 8, (size,), generator=g)
        self.similarity = torch.rand(size, generator=g)
        self.ends = torch.randint(20, length + 1, (size, rows), generator=g)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens, ends = self.tokens[index], self.ends[index, :, None]
        places = torch.arange(tokens.shape[1] - 1)
        real = places < ends
        learned = real & (places >= self.prompts[index])
        return {
            "input_ids": tokens[:, :-1].where(real, 0),
            "attention_mask": real.long(),
            "shift_labels": tokens[:, 1:].where(learned, -100),
            "position_ids": places.expand(len(tokens), -1),
            "similarity": self.similarity[index].expand(len(tokens)),
        }


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Put the rows of all samples one after the other: those of a pair stay together."""
    return {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}


def loader(rows: int = 1, batch_size: int = 2, size: int = 12) -> DataLoader[Any]:
    return DataLoader(Rows(size, rows=rows), batch_size=batch_size, collate_fn=collate)


def train(module: pl.LightningModule, rows: int = 1, steps: int = 20) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="sequence_parallel",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, loader(rows))


class Example(pl.LightningModule):
    """A model and a loss; a subclass has the loss."""

    def __init__(self, build: Callable[[], nn.Module] = model) -> None:
        super().__init__()
        self.model = build()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)
