"""Sequence parallelism in plain Python: an ordinary LightningModule, one argument to the Trainer.

    python examples/plain_python.py                    two processes of this machine
    torchrun --nproc-per-node 4 examples/plain_python.py --devices 4

The model below is written as if there were one device. Its positions come from the batch, its loss is a plain mean.
"""

import argparse

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import nn

import lightning_sp  # noqa: F401  registers strategy="sequence_parallel"; an installed package does so by itself
from lightning_sp.data import SequenceShardingDataModule


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.qkv, self.output = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        x = x + self.output(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class LanguageModel(LightningModule):
    def __init__(self, vocab_size: int, max_positions: int, dim: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, dim), nn.Embedding(max_positions, dim)
        self.blocks = nn.Sequential(Block(dim, num_heads=4), Block(dim, num_heads=4))
        self.head = nn.Linear(dim, vocab_size)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x = self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"])
        logits = self.head(self.blocks(x))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sequence-length", type=int, default=4096)
    options = parser.parse_args()
    data = SequenceShardingDataModule("stdlib", sequence_length=options.sequence_length, minimum_bytes=32768)
    trainer = Trainer(
        strategy="sequence_parallel",
        accelerator="auto",
        devices=options.devices,
        max_steps=options.steps,
        log_every_n_steps=1,
        enable_checkpointing=False,
    )
    trainer.fit(LanguageModel(data.vocab_size, options.sequence_length), datamodule=data)
    if trainer.is_global_zero:
        print(f"loss after {trainer.global_step} steps: {float(trainer.callback_metrics['train_loss']):.4f}")


if __name__ == "__main__":
    main()
