"""Learning from pairs of answers, the better one first: DPO, IPO and ORPO.

    python -m examples.losses.preferences

A sample is two rows. `sequence_sum` adds up an answer's log-probabilities over all ranks, `batch_mean` is the mean over the pairs of all
data-parallel groups. On one device both are plain sums and means.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.losses.tiny import Example, train
from lightning_sp.reductions import batch_mean, sequence_mean, sequence_sum


def log_probabilities(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Each token's log-probability, and which tokens are of the answer."""
    logits, labels = model(batch["input_ids"], batch["position_ids"]), batch["shift_labels"]
    return -F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none"), labels != -100


class DPO(Example):
    """Direct preference optimization against a frozen copy of the model."""

    def __init__(self, beta: float = 0.1) -> None:
        super().__init__()
        self.reference = copy.deepcopy(self.model).requires_grad_(False)
        self.beta = beta

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            reference = sequence_sum(*log_probabilities(self.reference, batch))
        ratios = sequence_sum(*log_probabilities(self.model, batch)) - reference
        chosen, rejected = ratios.view(-1, 2).unbind(1)
        return self.of_margins(chosen - rejected)

    def of_margins(self, margins: Tensor) -> Tensor:
        return batch_mean(-F.logsigmoid(self.beta * margins))


class IPO(DPO):
    """The margin itself is regressed, so it does not grow without end."""

    def of_margins(self, margins: Tensor) -> Tensor:
        return batch_mean((margins - 1 / (2 * self.beta)).square())


class ORPO(Example):
    """Learns the chosen answer and an odds ratio at once, without a reference."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        each, mask = log_probabilities(self.model, batch)
        chosen, rejected = sequence_mean(each, mask).view(-1, 2).unbind(1)
        odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
        return batch_mean(-each[::2], mask[::2]) + 0.1 * batch_mean(-F.logsigmoid(odds))


if __name__ == "__main__":
    train(DPO(), rows=2)
