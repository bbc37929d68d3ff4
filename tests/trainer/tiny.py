"""Tiny models and data for tests of the real Trainer, importable by name in spawned ranks."""

from __future__ import annotations

import logging
import warnings
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from lightning_sp import SequenceParallelStrategy
from lightning_sp.models import GPT, GPTConfig, Llama, LlamaConfig
from lightning_sp.testing import trainer_of_ranks
from tests.instruments.record import Record

VOCAB = 61


class TokenDataset(Dataset):
    """Whole samples with shifted labels; every third has most of its targets ignored, so ranks hold different counts."""

    def __init__(
        self, size: int = 8, length: int = 32, packed: bool = False, documents: tuple[int, ...] | None = None
    ) -> None:
        g = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(0, VOCAB, (size, length + 1), generator=g)
        self.packed, self.documents = packed, documents

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.tokens[index]
        targets = row[1:].clone()
        if index % 3 == 0:
            targets[: len(targets) * 3 // 4] = -100
        positions = torch.arange(len(targets))
        if self.packed:
            cut = 5 + index % 7
            positions = torch.cat([torch.arange(cut), torch.arange(len(targets) - cut)])
            targets[cut - 1] = -100
        if self.documents is not None:
            # The same documents in another order in each row.
            first = index % len(self.documents)
            lengths = [*self.documents[first:], *self.documents[:first]]
            positions = torch.cat([torch.arange(n) for n in lengths])
            targets[torch.tensor(lengths).cumsum(0) - 1] = -100
        return {"input_ids": row[:-1], "shift_labels": targets, "position_ids": positions}


class Plain(pl.LightningModule):
    """What a user writes: nothing of sequence parallelism in it."""

    def __init__(self, build: Any, lr: float = 0.01) -> None:
        super().__init__()
        self.build, self.lr = build, lr
        self.model: Any = None
        self.losses = Record()
        self.raw_grads: list[dict[str, torch.Tensor]] = []
        self.layouts: list[Any] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.build()

    def logits(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(batch["input_ids"], batch["position_ids"])

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten())
        self.log("train_loss", loss)
        self.losses.append(float(loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.layouts.append(getattr(self.trainer.strategy, "layout", None))
        self.raw_grads.append({n: _full(p.grad).clone() for n, p in self.named_parameters() if p.grad is not None})

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def steps_of(trainer: pl.Trainer) -> int:
    """Return the optimizer steps so far by what no trial shows later numbers of: a test's own count."""
    return int(trainer.fit_loop.epoch_loop.global_step)


def _full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def tiny_llama(num_layers: int = 1) -> nn.Module:
    return Llama(
        LlamaConfig(vocab_size=VOCAB, dim=32, num_layers=num_layers, num_heads=4, num_kv_heads=2, hidden_dim=48)
    )


def tiny_gpt(dropout: float = 0.0, num_layers: int = 1) -> nn.Module:
    return GPT(
        GPTConfig(vocab_size=VOCAB, dim=32, num_layers=num_layers, num_heads=4, max_positions=64, dropout=dropout)
    )


class HuggingFaceLlama(nn.Module):
    """transformers' own Llama, called like the others."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=48, use_cache=False,
        )  # fmt: skip
        self.inner = LlamaForCausalLM(config)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=input_ids, position_ids=position_ids).logits


class BothWays(nn.Module):
    """One layer of attention without a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCAB, 32), nn.Embedding(64, 32)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = (self.embedding(input_ids) + self.positions(position_ids)).unflatten(-1, (4, 8)).transpose(1, 2)
        return self.head(F.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2))


# Two layers where it is the whole that is tried: tests of one question have one layer, a fit of which takes a quarter less.
MODELS = {
    "both ways": BothWays,
    "llama": partial(tiny_llama, num_layers=2),
    "gpt": partial(tiny_gpt, num_layers=2),
    "dropout gpt": partial(tiny_gpt, dropout=0.2, num_layers=2),
    "hugging face": HuggingFaceLlama,
}


def quiet_trainer(world: int, **options: Any) -> pl.Trainer:
    """A Trainer without output, on the ranks that already run; a step sees its rank's part unless told otherwise, and is refused there."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    strategy = options.pop("strategy", None) or {}
    defaults: dict[str, Any] = dict(
        **trainer_of_ranks(world), logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, max_epochs=1, precision="64-true",
    )  # fmt: skip
    strategy = {"global_view": False, **strategy}
    return pl.Trainer(strategy=SequenceParallelStrategy(**strategy), **{**defaults, **options})


def plain_trainer(**options: Any) -> pl.Trainer:
    """Plain Lightning's Trainer of one device, without output."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        precision="64-true", **options,
    )  # fmt: skip


def fit(
    model: str,
    world: int,
    strategy: dict[str, Any],
    data: dict[str, Any] | list[dict[str, Any]],
    micro: int = 2,
    **options: Any,
) -> dict[str, Any]:
    """Fit a tiny model on one dataset, or on several one after the other; return losses, raw gradients and final weights."""
    torch.manual_seed(3)
    module = Plain(MODELS[model])
    several = data if isinstance(data, list) else [data]
    packed = any(each.get("packed") or each.get("documents") for each in several)
    trainer = quiet_trainer(world, strategy={"packed_documents": True, **strategy} if packed else strategy, **options)
    rows = ConcatDataset([TokenDataset(**each) for each in several])
    trainer.fit(module, DataLoader(rows, batch_size=micro))
    weights = {n: _full(p.detach()).clone() for n, p in module.named_parameters()}
    return {
        "losses": module.losses,
        "grads": module.raw_grads,
        "weights": weights,
        "layouts": module.layouts,
        "mesh": trainer.strategy.sequence_mesh.describe(),
    }
