"""Penalties on the weights inside of a training step, as users write them: what each rank runs in test_penalties.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.trainer.lightning_ranks import fitted, trainer_of
from tests.trainer.tiny import Plain, TokenDataset, tiny_gpt


def l1(self: Any) -> Any:
    return 0.001 * sum(p.abs().sum() for p in self.parameters())


def l2(self: Any) -> Any:
    total: Any = 0
    for p in self.model.parameters():
        total += p.pow(2).sum()
    return 0.01 * total


def l2_from_a_tensor(self: Any) -> Any:
    total = torch.zeros((), dtype=torch.float64)
    for p in self.model.parameters():
        if p.requires_grad:
            total = total + torch.sum(p**2) / 2
    return total * 0.02


def l2_in_place(self: Any) -> Any:
    total = torch.zeros((), dtype=torch.float64)
    for p in self.model.parameters():
        total += p.square().mean()
    return total


def norms(self: Any) -> Any:
    found = [p.norm() for p in self.parameters()]
    self.log("largest", torch.stack(found).max())
    return 0.01 * sum(found) + 0.01 * sum(torch.norm(p, p=1) + torch.linalg.norm(p) for p in self.parameters())


def elastic(self: Any) -> Any:
    weights = [p for name, p in self.named_parameters() if "norm" not in name]
    first = sum(torch.linalg.vector_norm(p, ord=1) for p in weights)
    return 0.001 * first + 0.01 * torch.stack([torch.sum(p * p) for p in weights]).sum()


def concatenated(self: Any) -> Any:
    return 0.01 * torch.cat([p.view(-1) for p in self.model.parameters()]).norm(2)


def vector(self: Any) -> Any:
    return 0.001 * torch.nn.utils.parameters_to_vector(self.parameters()).pow(2).sum()


def ewc(self: Any) -> Any:
    """From whole copies, made before the run."""
    return sum((self.fisher[n] * (p - self.old[n]) ** 2).sum() for n, p in self.model.named_parameters())


def ewc_of_shards(self: Any) -> Any:
    """From copies that a hook made when the run began."""
    found = [((p - self.kept[n]) ** 2 * self.kept[n].abs()).sum() for n, p in self.named_parameters()]
    return 0.1 * torch.stack(found).mean()


def orthogonality(self: Any) -> Any:
    w = self.model.layers[0].attention.qkv.weight if hasattr(self.model.layers[0], "attention") else None
    w = next(p for p in self.model.layers.parameters() if p.dim() == 2) if w is None else w
    return 0.01 * ((w.T @ w - torch.eye(w.shape[1], dtype=w.dtype)) ** 2).sum()


def spectral(self: Any) -> Any:
    w = next(p for p in self.model.layers.parameters() if p.dim() == 2)
    return 0.01 * torch.linalg.matrix_norm(w, 2) + 0.01 * w.norm(dim=1).pow(2).sum() + 0.01 * w[0].abs().max()


def of_this_data(self: Any) -> Any:
    """A factor that is another number in each batch."""
    return self.scale_of_batch * sum(p.pow(2).mean() for p in self.model.parameters())


def logged(self: Any) -> Any:
    """Norms for a logger, as numbers and as tensors."""
    with torch.no_grad():
        self.log("norm", sum(p.norm() ** 2 for p in self.parameters()) ** 0.5)
    self.log("norm_2", torch.sqrt(sum(p.detach().pow(2).sum() for p in self.parameters())))
    self.log("norm_3", sum(p.pow(2).sum().item() for p in self.parameters()))
    self.log("norm_4", sum(p.abs().sum() for p in self.parameters()))
    self.log("drift", max(float((p.detach() - self.old[n]).abs().max()) for n, p in self.model.named_parameters()))
    self.log("zeros", sum((p == 0).sum() for p in self.parameters()).double())
    return 0.0


def head_by_hand(self: Any) -> Any:
    """A product with a weight without a call of its module."""
    w = next(p for p in self.model.layers.parameters() if p.dim() == 2 and p.shape[1] == 32)
    return 0.1 * F.linear(torch.ones(1, 32, dtype=w.dtype), w).tanh().mean()


def of_kept_parameters(self: Any) -> Any:
    """Of parameters that the module has kept since before they were sharded: in a list, a dict, an object."""
    return 0.01 * sum(p.pow(2).sum() for p in self.listed) + 0.001 * sum(
        p.abs().sum() for p in self.kept_by.values.values()
    )


class Keeper:
    def __init__(self, model: torch.nn.Module) -> None:
        self.values = dict(model.named_parameters())


PENALTIES = {f.__name__: f for f in (
    l1, l2, l2_from_a_tensor, l2_in_place, norms, elastic, concatenated, vector, ewc, ewc_of_shards, orthogonality, spectral, logged,
    of_this_data, head_by_hand, of_kept_parameters,
)}  # fmt: skip


class Penalised(Plain):
    """A language model whose loss has penalties on its weights ("l1 + norms"), before its forward or behind it."""

    def __init__(self, penalty: str, first: bool) -> None:
        super().__init__(tiny_gpt)
        self.penalties, self.first = [PENALTIES[name] for name in penalty.split(" + ")], first
        torch.manual_seed(3)
        self.model = tiny_gpt()
        # In no forward: their gradients are the penalty's alone, of the root's unit and of a block's, whose backward ends before.
        self.model.unused, self.model.layers[0].unused = torch.nn.Linear(5, 1), torch.nn.Linear(5, 3)
        self.own = torch.nn.Linear(61, 61)
        for (
            p
        ) in self.parameters():  # of a bias that is zero, and has no gradient but rounding, the sign is a rounding's
            p.data += 0.1 * torch.randn_like(p)
        self.listed, self.kept_by = list(self.parameters()), Keeper(self.model)
        drawn = torch.Generator().manual_seed(1)
        draw = lambda p: torch.rand(p.shape, generator=drawn, dtype=torch.float64)  # noqa: E731
        self.old = {n: draw(p) for n, p in self.model.named_parameters()}
        self.fisher = {n: draw(p) for n, p in self.model.named_parameters()}

    def on_train_start(self) -> None:
        self.kept = {n: p.detach().clone() * 0.9 for n, p in self.named_parameters()}

    def logits(self, batch: Any) -> Tensor:
        return self.own(self.model(batch["input_ids"], batch["position_ids"]))

    def penalty(self) -> Any:
        return sum(each(self) for each in self.penalties)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.scale_of_batch = 0.1 * (1 + batch_idx)
        penalty = self.penalty() if self.first else None
        loss = F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten())
        penalty = self.penalty() if penalty is None else penalty
        self.log("penalty", penalty)
        loss = loss + penalty
        self.log("train_loss", loss)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def runs(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [run(**case) for case in cases]


def run(
    penalty: str,
    strategy: dict[str, Any] | None,
    world: int,
    micro: int = 2,
    size: int = 8,
    first: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Fit under plain Lightning (None) or ours; losses, gradients and weights, or the refusal."""
    module = Penalised(penalty, first)
    trainer = trainer_of(strategy, world, **options)
    data = TokenDataset(size)
    rows = [
        {**data[i], "shift_labels": data.tokens[i, 1:]} for i in range(size)
    ]  # micro-batches of one weight, as Lightning's are
    try:
        trainer.fit(module, DataLoader(rows, batch_size=micro))  # type: ignore[arg-type]
    except SequenceParallelError as error:
        return {"error": str(error)}
    return {**fitted(trainer, module), "grads": module.raw_grads}
