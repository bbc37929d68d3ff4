"""What each rank runs in test_whole_sequences.py: losses of data parallelism alone, and what DDP gives, in plain torch on one process."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sp.reductions import batch_mean, batch_sum
from tests.loss.loss_ranks import Loss, fits, rows_of


class GroupLoss(Loss):
    """Losses as they are written for DDP, and some of our vocabulary beside them."""

    calls: ClassVar[list[int]] = []

    def _sum_over_tokens(self, logits: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labels.numel()

    def _sum_over_own_targets(self, logits: Tensor, labels: Tensor) -> Any:
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / (labels != -100).sum()

    def _sum_of_kept(self, logits: Tensor, labels: Tensor) -> Any:
        keep = labels % 3 == 0
        return F.cross_entropy(logits[keep], labels[keep], reduction="sum") / keep.sum() + 1e-3 * logits.square().mean()

    def _kl_of_rows(self, logits: Tensor, labels: Tensor) -> Any:
        wanted = F.one_hot(labels.clamp(min=0), logits.shape[-1]).double() * 0.9 + 0.1 / logits.shape[-1]
        return F.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean")

    def _sum_of_squares(self, logits: Tensor, labels: Tensor) -> Any:
        return 1e-3 * logits.pow(2).sum()

    def _contrastive(self, logits: Tensor, labels: Tensor) -> Any:
        pooled = F.normalize(logits.mean(1), dim=-1)
        return -(pooled @ pooled.roll(1, 1).T / 0.1).log_softmax(-1).diagonal().mean()

    def _by_arithmetic(self, logits: Tensor, labels: Tensor) -> Any:
        mask = labels[:, :-1] != -100
        each = (logits[:, 1:, 0] - logits[:, :-1, 1]) ** 2 * mask
        return each.sum() / (1 + mask.sum() + len(labels))

    def _counts_calls(self, logits: Tensor, labels: Tensor) -> Any:
        self.calls.append(0)
        return self._plain(logits, labels) * (1 + 0.1 * len(self.calls))

    def _at_times(self, logits: Tensor, labels: Tensor) -> Any:
        return self._by_arithmetic(logits, labels) if len(self.losses) % 2 else self._plain(logits, labels)

    def _drawn(self, logits: Tensor, labels: Tensor) -> Any:
        return self._plain(logits + torch.randn_like(logits), labels)

    def _sum_over_all_targets(self, logits: Tensor, labels: Tensor) -> Any:
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / batch_sum(labels != -100)

    def _sum_over_rows_and_penalty(self, logits: Tensor, labels: Tensor) -> Any:
        return self._over_rows(logits, labels) + 1e-3 * batch_mean(logits.square())

    def _sum_over_all_targets_and_own(self, logits: Tensor, labels: Tensor) -> Any:
        return self._sum_over_all_targets(logits, labels) + self._by_arithmetic(logits, labels)

    def _sum_of_kept_squares(self, logits: Tensor, labels: Tensor) -> Any:
        keep = labels % 3 == 0
        return batch_sum(logits[keep].square().sum(-1)) / batch_sum(keep)

    def _sum_of_kept_and_reductions(self, logits: Tensor, labels: Tensor) -> Any:
        keep = labels % 3 == 0
        return F.cross_entropy(logits[keep], labels[keep], reduction="sum") / batch_sum(keep)


# What the gradient is of: one loss on all rows, or the mean over the groups of a loss on each group's rows.
GLOBAL = (
    "plain", "two", "sum_over_all_targets", "sum_over_rows_and_penalty", "sum_of_kept_squares", "sum_of_kept_and_reductions",
    "sum_over_own_targets", "sum_of_kept", "sum_of_squares", "by_arithmetic", "sum_over_all_targets_and_own",
)  # fmt: skip
OF_GROUPS = ("over_rows", "sum_over_tokens", "kl_of_rows", "contrastive")


def gradients(
    kind: str, groups: int, micro: int, masks: str = "uneven", size: int = 8, accumulate: int = 1
) -> list[dict[str, Tensor]]:
    """Return the gradient of each step of one process."""
    torch.set_num_threads(1)
    module = GroupLoss(kind).double()
    rows = rows_of(masks, size)
    steps = []
    for index, start in enumerate(range(0, size, micro), 1):
        batch = {name: torch.stack([row[name] for row in rows[start : start + micro]]) for name in rows[0]}
        parts = 1 if kind in GLOBAL else groups
        for part in range(parts):
            own = {name: each.chunk(parts)[part] for name, each in batch.items()}
            (getattr(module, f"_{kind}")(module.logits(own), own["shift_labels"]) / parts / accumulate).backward()
        if index % accumulate:
            continue
        steps.append({name: p.grad.clone() for name, p in module.named_parameters()})
        module.zero_grad()
    return steps


def group_fits(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As `fits`, of these losses."""
    return fits(cases, GroupLoss)
