"""What each rank runs in test_parts.py; returns plain values."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp.reductions import at_positions, batch_mean
from tests.flows.tiny import llama, sizes
from tests.trainer.lightning_ranks import trainer_of


def distilbert() -> Any:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    return DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=sizes()["vocab_size"], dim=32, hidden_dim=48, n_layers=2, n_heads=4, dropout=0.0, attention_dropout=0.0,
            seq_classif_dropout=0.0, num_labels=3, pad_token_id=0,
        )
    )  # fmt: skip


class Parts(pl.LightningModule):
    """A classifier, and a part of it that the step calls by itself, with other tokens."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        super().__init__()
        self.model, self.kind = model, kind

    def own(self, batch: Any) -> Tensor:
        """What the part gives of other tokens, after the classifier ran."""
        ids = batch["input_ids"].flip(0)
        if self.kind == "base":
            return at_positions(self.model.distilbert(ids)[0], 5).square().mean()
        values = self.model.score(self.model.model(ids).last_hidden_state)
        return batch_mean(values.square().squeeze(-1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = (
            {"inputs_embeds": self.model.get_input_embeddings()(batch["input_ids"])} if self.kind == "base" else batch
        )
        loss = self.model(**inputs).logits.square().mean() + self.own(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.model(batch["input_ids"])
        self.log("val_loss", self.own(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def trained(kind: str, strategy: dict[str, Any] | None) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Fit and validate; return what was logged, and the weights."""
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(5)
    model = distilbert() if kind == "base" else LlamaForSequenceClassification(llama(num_labels=1).config)
    module = Parts(model, kind)
    ids = torch.randint(6, 40, (8, 18), generator=torch.Generator().manual_seed(0))
    loader = DataLoader([{"input_ids": row} for row in ids], batch_size=4)
    trainer = trainer_of(strategy, torch.distributed.get_world_size() if strategy else 1)
    trainer.fit(module, loader, loader)
    weights = {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in module.named_parameters()
    }
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, weights
