"""A frozen teacher of another architecture, in the same module: its distribution over the next token is what the student learns.

python -m examples.losses.distillation
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.losses.tiny import VOCAB, Example, train
from lightning_sp.models import GPTConfig
from lightning_sp.reductions import batch_mean


class Distillation(Example):
    """The divergence from the teacher, over all tokens of the answers, and the usual loss."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = GPTConfig(vocab_size=VOCAB, dim=16, num_layers=1, num_heads=4, max_positions=64).build()
        self.teacher.requires_grad_(False).eval()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["shift_labels"]
        logits = self.model(batch["input_ids"], batch["position_ids"])
        with torch.no_grad():
            wanted = self.teacher(batch["input_ids"], batch["position_ids"]).log_softmax(-1)
        each = F.kl_div(logits.log_softmax(-1), wanted, reduction="none", log_target=True).sum(-1)
        return batch_mean(each, labels != -100) + 0.5 * F.cross_entropy(logits.movedim(-1, 1), labels)


if __name__ == "__main__":
    train(Distillation())
