"""A reward model: the score of an answer's last token, the better of two answers first.

python -m examples.losses.reward_model
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from examples.losses.tiny import VOCAB, Example, train
from lightning_sp.reductions import batch_mean, last_token


class RewardModel(Example):
    """Bradley-Terry over pairs: a sample is two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(VOCAB, 1)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        features = self.model(batch["input_ids"], batch["position_ids"])
        rewards = self.score(last_token(features, batch["attention_mask"])).view(-1, 2)
        return batch_mean(-F.logsigmoid(rewards[:, 0] - rewards[:, 1]))


if __name__ == "__main__":
    train(RewardModel(), rows=2)
