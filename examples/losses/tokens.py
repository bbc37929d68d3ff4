"""Losses of tokens beside the usual one: several next tokens at once, a penalty on the partition function, a weight for each token.

python -m examples.losses.tokens
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.losses.tiny import VOCAB, Example, train
from lightning_sp.reductions import batch_mean, batch_sum, sequence_max, shift


class SeveralTokens(Example):
    """Multi-token prediction: head k predicts the token k places further on."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(VOCAB, VOCAB) for _ in range(3))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        features = self.model(batch["input_ids"], batch["position_ids"])
        # A shard does not have the tokens that follow its last one: shift looks them up.
        targets = [shift(batch["shift_labels"], offset, fill=-100) for offset in range(len(self.heads))]
        losses = [
            F.cross_entropy(head(features).movedim(-1, 1), t) for head, t in zip(self.heads, targets, strict=True)
        ]
        return torch.stack(losses).mean()


class ZLoss(Example):
    """Cross entropy and a small penalty on log Z."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = self.model(batch["input_ids"], batch["position_ids"]), batch["shift_labels"]
        penalty = batch_mean(logits.logsumexp(-1).square(), labels != -100)
        return F.cross_entropy(logits.movedim(-1, 1), labels) + 1e-2 * penalty


class Weighed(Example):
    """Each token weighs by its own number: here the focal loss' power of what is not yet learned, by the hardest token of its row."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = self.model(batch["input_ids"], batch["position_ids"]), batch["shift_labels"]
        each = F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none")
        weights = each.detach().square() / sequence_max(each.detach(), labels != -100).square().unsqueeze(1)
        return batch_sum(weights * each) / batch_sum(weights)


if __name__ == "__main__":
    train(SeveralTokens())
