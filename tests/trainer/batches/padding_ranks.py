"""Steps that read labels as indices, on lengths that the ranks do not divide: what each rank runs in test_padding.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.trainer.lightning_ranks import fitted, trainer_of
from tests.trainer.tiny import VOCAB, Plain, TokenDataset, tiny_gpt


def gather(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).mean()


def one_hot(logits: Tensor, labels: Tensor) -> Tensor:
    return -(logits.log_softmax(-1) * F.one_hot(labels, VOCAB)).sum(-1).mean()


def embedding(logits: Tensor, labels: Tensor) -> Tensor:
    wanted = F.embedding(labels, torch.eye(VOCAB, dtype=logits.dtype))
    return F.mse_loss(logits, wanted)


def take(logits: Tensor, labels: Tensor) -> Tensor:
    return -torch.take_along_dim(logits.log_softmax(-1), labels[..., None], dim=-1).squeeze(-1).mean()


def asserted(logits: Tensor, labels: Tensor) -> Tensor:
    assert (labels >= 0).all()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    """Minds -100, as it is to be."""
    keep = labels != -100
    logp = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(logp * keep).sum() / keep.sum()


LOSSES = {f.__name__: f for f in (gather, one_hot, embedding, take, asserted, masked)}


class Read(Plain):
    def __init__(self, loss: str, plainly: bool) -> None:
        super().__init__(tiny_gpt)
        self.plainly = plainly
        self.read = LOSSES[loss]
        self.validated: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.plainly:
            loss = F.cross_entropy(self.logits(batch).flatten(0, 1), batch["labels"].flatten())
        else:
            loss = self.read(self.logits(batch), batch["labels"])
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.read(self.logits(batch), batch["labels"]), sync_dist=True)


def runs(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [run(**case) for case in cases]


def run(
    loss: str,
    strategy: dict[str, Any] | None,
    world: int,
    lengths: tuple[int, ...],
    micro: int = 2,
    validates: bool = False,
    plainly: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Fit on one batch of each length; losses and weights, or the refusal."""
    torch.manual_seed(3)
    module = Read(loss, plainly)
    batches = []
    for number, length in enumerate(lengths):
        data = TokenDataset(4, length)
        rows = [{**data[i], "labels": data.tokens[i, 1:]} for i in range(4)]
        for row in rows:
            row.pop("shift_labels")
        batches.append([rows[(i + number) % 4] for i in range(4)])
    if strategy is not None:
        strategy = {"labels_shifted": True, **strategy}
    trainer = trainer_of(strategy, world, **options)
    flat = [row for rows in batches for row in rows]
    train = DataLoader(flat if not validates else flat[:4], batch_size=micro)  # type: ignore[arg-type]
    try:
        trainer.fit(module, train, DataLoader(flat, batch_size=micro) if validates else None)  # type: ignore[arg-type]
    except SequenceParallelError as error:
        return {"error": str(error)}
    return {**fitted(trainer, module), "view": bool(strategy) and trainer.strategy.sees_whole_sequences}
