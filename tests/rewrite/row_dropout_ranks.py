"""What each rank runs in test_row_dropout.py; returns plain values."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from lightning_sp.reductions import sequence_mean, unshard
from tests.instruments.record import Record
from tests.trainer.lightning_ranks import trainer_of
from tests.trainer.tiny import VOCAB, TokenDataset, tiny_llama


class Classifier(pl.LightningModule):
    """Classes of rows by a pooled state, with dropout of it; what it dropped is kept."""

    def __init__(self, p: float = 0.5, functional: bool = True, repeats: int = 1) -> None:
        super().__init__()
        self.model, self.head, self.drop = tiny_llama(), nn.Linear(VOCAB, 3), nn.Dropout(p)
        self.p, self.functional, self.repeats = p, functional, repeats
        self.dropped: list[Tensor] = []
        self.losses = Record()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        states = self.model(batch["input_ids"], batch["position_ids"])
        pooled = torch.cat([sequence_mean(states)] * self.repeats)
        # The mask itself, of states that are nowhere 0.
        pooled = F.dropout(pooled, self.p) if self.functional else self.drop(pooled)
        self.dropped.append(pooled.detach() == 0)
        whole = self.drop(unshard(states))
        loss = F.mse_loss(self.head(pooled), torch.ones(len(pooled), 3).to(pooled)) + whole.square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log(
            "val_loss", F.dropout(sequence_mean(self.model(batch["input_ids"], batch["position_ids"])), self.p).mean()
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(strategy: dict[str, Any], rows: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Fit two steps; return the losses, what was dropped, and the error if there is one."""
    torch.manual_seed(5)
    module = Classifier(**arguments)
    world = torch.distributed.get_world_size()
    error = ""
    try:
        trainer_of(strategy, world, max_steps=2).fit(module, DataLoader(TokenDataset(8), batch_size=rows))
    except SequenceParallelError as refusal:
        error = str(refusal)
    # Those before are the preflight's, which drops nothing.
    return {"losses": module.losses[-2:], "dropped": module.dropped[-2:], "error": error}


class Channels(Classifier):
    """Drops tokens whose channels come first, (B, C, s), after a reduction."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        states = self.model(batch["input_ids"], batch["position_ids"])
        pooled = sequence_mean(states)
        tokens = F.dropout(states.movedim(1, 2), self.p)
        self.dropped.append(tokens.detach() == 0)
        return F.mse_loss(self.head(pooled), torch.ones(len(pooled), 3).to(pooled)) + 0 * tokens.sum()


def channels() -> Tensor:
    """Return which elements of its own tokens this rank drops in the first step."""
    torch.manual_seed(5)
    module = Channels()
    trainer_of({"ring_size": 2, "preflight": False}, 2, max_steps=1).fit(
        module, DataLoader(TokenDataset(4), batch_size=4)
    )
    return module.dropped[0]


def validated() -> str:
    """Evaluate with dropout of a row's state; return the refusal."""
    try:
        trainer_of({"ring_size": 2}, 2).validate(Classifier(), DataLoader(TokenDataset(4), batch_size=4), verbose=False)
    except SequenceParallelError as error:
        return str(error)
    return "not refused"


def bert(strategy: dict[str, Any]) -> list[float]:
    """Train BERT's classifier with the dropout of its own configuration; return the losses."""
    from transformers import BertConfig, BertForSequenceClassification

    from tests.flows.tiny import Tuned, bert_sizes

    torch.manual_seed(5)
    sizes = bert_sizes(num_labels=3)
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"):
        del sizes[name]
    module = Tuned(BertForSequenceClassification(BertConfig(**sizes)))
    losses: list[float] = []
    module.on_before_backward = lambda loss: losses.append(float(loss.detach()))  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(6, 40, (8, 16), generator=generator)
    rows = [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": torch.tensor(i % 3)}
        for i, row in enumerate(ids)
    ]
    trainer_of(strategy, torch.distributed.get_world_size(), max_steps=2).fit(module, DataLoader(rows, batch_size=4))
    return losses
