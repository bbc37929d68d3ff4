"""Embeddings of a question and its answer: each is told from the answers of all other questions in the global batch.

    python -m examples.losses.contrastive

`sequence_mean` pools over all tokens that are no padding. `gather_rows` brings the embeddings of all data-parallel groups together, and each
rank's gradient back to the rows that it came from.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.losses.tiny import VOCAB, Example, train
from lightning_sp.reductions import batch_mean, gather_rows, sequence_mean


class Contrastive(Example):
    """InfoNCE with in-batch negatives: a sample is two rows."""

    def embed(self, batch: dict[str, Tensor]) -> Tensor:
        features = self.model(batch["input_ids"], batch["position_ids"])
        return F.normalize(sequence_mean(features, batch["attention_mask"]), dim=-1)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        questions, answers = gather_rows(self.embed(batch)).view(-1, 2, VOCAB).unbind(1)
        similarity = questions @ answers.t() / 0.05
        return F.cross_entropy(similarity, torch.arange(len(similarity), device=similarity.device))


class Similarity(Contrastive):
    """Embeddings whose similarity is a number that the data gives."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        first, second = self.embed(batch).view(-1, 2, VOCAB).unbind(1)
        wanted = batch["similarity"].view(-1, 2)[:, 0]
        return batch_mean(F.mse_loss((first * second).sum(-1), wanted.to(first.dtype), reduction="none"))


if __name__ == "__main__":
    train(Contrastive(), rows=2)
