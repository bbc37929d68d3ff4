"""What runs in the ranks: steps that cut their tokens by a number of Python's, which is beyond the sequence at first."""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_sp import SequenceParallelError
from tests.trainer.tiny import Plain, TokenDataset, _full, plain_trainer, quiet_trainer, tiny_llama

TOKENS = 16


class Cuts(Plain):
    def __init__(self, kind: str) -> None:
        super().__init__(tiny_llama, lr=0.05)
        self.kind, self.norm = kind, 0.0
        self.register_buffer("seen", torch.zeros(3))
        self.queue: deque[Tensor] = deque(maxlen=2)
        self.mean = MeanMetric()
        self.met: set[int] = set()
        self.texts: list[str] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norm += float(
            torch.nn.utils.get_total_norm([_full(p.grad) for p in self.parameters() if p.grad is not None])
        )

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen[1] += 1

    def length(self) -> int:
        """Return how many tokens count: all until a number that no name says is another."""
        match self.kind:
            case "gradients":
                is_early = self.norm < 1e-6
            case "state":
                states = list(self.optimizers().state.values())
                is_early = not states or int(states[0].get("step", 0)) < 2
            case "batches":
                is_early = self.trainer.fit_loop.total_batch_idx < 2
            case "metric":  # of the steps before: 4.16, 4.17, 4.21, 4.20
                is_early = self.trainer.global_step == 0 or float(self.mean.compute()) < 4.19
            case "short":
                is_early = False
            case _:
                is_early = float(self.seen[1]) < 2
        return TOKENS if is_early else 8

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids, targets = batch["input_ids"], batch["shift_labels"]
        positions = batch["position_ids"]
        if self.kind == "pieces":  # by which a part loses nothing
            logits = self.model(ids[:, : ids.shape[1]], positions)
            pieces = [logits[:, i : i + 100] * 1.0 for i in range(0, ids.shape[1], 100)]
            loss = F.cross_entropy(torch.cat(pieces, 1).flatten(0, 1), targets.flatten())
        elif self.kind == "queue":
            loss = F.cross_entropy(self.model(ids, positions).flatten(0, 1), targets.flatten())
            self.queue.append(self.model.embedding.weight.detach().mean(0))
            loss = loss * (1 + sum(each.mean() for each in self.queue))
        elif self.kind in ("elements", "texts"):  # of the sequences' first tokens
            if self.kind == "elements":
                self.met |= set(ids[:, 0].tolist())
            else:
                self.texts += [str(each) for each in ids[:, 0].tolist() if each < 50]
            loss = F.cross_entropy(self.model(ids, positions).flatten(0, 1), targets.flatten())
            loss = loss * (1 + len(self.met))
        elif self.kind == "buffer":  # labels alone
            targets = targets.clone()
            targets[:, : TOKENS - self.length()] = -100
            loss = F.cross_entropy(self.model(ids, positions).flatten(0, 1), targets.flatten())
        elif self.kind in ("positions", "loop"):  # labels alone, otherwise
            targets = targets.clone()
            if self.kind == "loop":
                for place in range(self.length(), targets.shape[1]):
                    targets[:, place] = -100
            else:
                targets = targets.masked_fill(torch.arange(targets.shape[1]) >= self.length(), -100)
            loss = F.cross_entropy(self.model(ids, positions).flatten(0, 1), targets.flatten())
        else:
            n = self.length() if self.kind != "smaller" else min(self.length(), ids.shape[1])
            loss = F.cross_entropy(self.model(ids[:, :n], positions[:, :n]).flatten(0, 1), targets[:, :n].flatten())
        self.mean.update(loss.detach())
        self.losses.append(float(loss.detach()))
        return loss


def fit(kind: str, strategy: dict[str, Any] | None) -> dict[str, Any]:
    """Fit five steps."""
    torch.manual_seed(3)
    module, error = Cuts(kind), ""
    trainer = plain_trainer(max_steps=5) if strategy is None else quiet_trainer(2, strategy=strategy, max_steps=5)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, DataLoader(TokenDataset(size=10, length=TOKENS), batch_size=2))  # type: ignore[arg-type]
        except SequenceParallelError as refusal:
            error = str(refusal)
    weights = {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
    whole = getattr(trainer.strategy, "sees_whole_sequences", False)
    told = "".join(str(each.message) for each in warned)
    return {"error": error, "losses": module.losses, "weights": weights, "whole": whole, "warned": told}
