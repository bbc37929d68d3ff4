"""What runs in the ranks: losses with a term that looks along the sequence, and counts for nothing while the first step is tried."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.trainer.tiny import VOCAB, Plain, TokenDataset, quiet_trainer, tiny_llama


class Backwards(torch.autograd.Function):
    """Gives what it is given, and a gradient of the tokens before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.cumsum(1)


class Hiding(Plain):
    def __init__(self, kind: str) -> None:
        super().__init__(tiny_llama)
        self.kind = kind
        self.aux = nn.Linear(VOCAB, VOCAB)
        self.register_buffer("weight", torch.zeros(()))
        self.gates = nn.Parameter(torch.tensor([1.0, 0.0]))

    def configure_model(self) -> None:
        super().configure_model()
        if self.kind == "teacher" and not hasattr(self, "teacher"):
            self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def distilled(self, batch: dict[str, Tensor], logits: Tensor) -> Tensor:
        """Return how far a teacher is, which is the student at first: 0, of its own tokens."""
        with torch.no_grad():
            teacher = self.teacher(batch["input_ids"], batch["position_ids"])
        return F.mse_loss(logits, teacher)

    def policy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return a policy's loss on its own answers, of advantages that add up to 0: its value is 0, whatever tokens a rank has."""
        logp = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
        ratio = torch.exp(logp - logp.detach())
        advantages = torch.tensor([1.0, -1.0], dtype=logp.dtype)
        return -torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None]).mean(1).mean()

    def term(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.kind != "exact":
            logits = logits.cumsum(1)
        return F.cross_entropy(self.aux(logits).flatten(0, 1), targets.flatten())

    def joined(self, ce: Tensor, term: Tensor) -> Tensor:
        weight = 0.0
        match self.kind:
            case "number" | "exact":
                return ce + weight * term
            case "buffer":
                return ce + term * self.weight
            case "vector":
                return (torch.stack([ce, term]) * torch.tensor([1.0, 0.0])).sum()
            case "alpha":
                return torch.add(ce, term, alpha=weight)
            case "lerp":
                return torch.lerp(ce, term, weight)
            case "where":
                return torch.where(torch.tensor(True), ce, ce + term)
            case "clamp":
                return ce + (term - 100.0).clamp(min=0)
            case "relu":
                return ce + F.relu(term - 100.0)
            case "maximum":
                return torch.maximum(ce, term - 100.0)
            case "never":
                return ce + 0.0 * term
        return ce

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, targets = self.logits(batch), batch["shift_labels"]
        if self.kind == "slope":
            logits = self.gates[0] * logits + self.gates[1] * Backwards.apply(logits)
        if self.kind == "policy":
            return self.policy(logits, targets)
        ce = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if self.kind == "teacher":
            return ce + self.distilled(batch, logits)
        if self.kind == "small":  # of float32's tolerance
            return ce + 1e-4 * F.cross_entropy(logits.cumsum(1).flatten(0, 1), targets.flatten())
        return self.joined(ce, self.term(logits, targets))


def fit(kind: str, precision: str = "64-true", global_view: bool | str = False) -> dict[str, Any]:
    """Return what was refused in one step, and which view the step had."""
    torch.manual_seed(3)
    strategy = {"ring_size": 2, "global_view": global_view}
    trainer, error = quiet_trainer(2, strategy=strategy, max_steps=1, precision=precision), ""
    try:
        trainer.fit(Hiding(kind), DataLoader(TokenDataset(2), batch_size=2))
    except SequenceParallelError as refusal:
        error = str(refusal)
    return {"error": error, "whole": trainer.strategy.sees_whole_sequences}
