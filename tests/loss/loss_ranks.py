"""What each rank runs in test_loss.py, and the token means by hand, in plain torch; returns plain values."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError, sharded_cross_entropy
from lightning_sp.comm import collectives
from lightning_sp.loss import reduction
from lightning_sp.loss.check import LossCheck
from lightning_sp.loss.interception import CrossEntropyInterception
from lightning_sp.loss.token_weighting import TokenWindow
from lightning_sp.reductions import (
    at_positions,
    batch_mean,
    batch_sum,
    last_token,
    sequence_mean,
    sequence_sum,
    shift,
    unshard,
)
from tests.trainer.tiny import VOCAB, Plain, TokenDataset, quiet_trainer, tiny_gpt

WEIGHTS = torch.linspace(0.001, 0.009, VOCAB, dtype=torch.float64)


class Loss(Plain):
    """A GPT with a loss of choice, written as one writes it for one process."""

    def __init__(self, kind: str) -> None:
        super().__init__(None)
        torch.manual_seed(3)
        self.model, self.kind = tiny_gpt(), kind
        self.cross_entropy = nn.CrossEntropyLoss()
        self.logged: list[float] = []
        if kind.endswith(("_times", "_step")):
            self.losses: Any = []  # whose length decides: the preflight is to see it

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = getattr(self, f"_{self.kind}")(self.logits(batch), batch["shift_labels"])
        if isinstance(output, Tensor):
            self.log("train_loss", output)
            self.losses.append(float(output.detach()))
        return output

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.logged.append(float(self.trainer.callback_metrics.get("train_loss", torch.nan)))

    def _plain(self, logits: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def _module(self, logits: Tensor, labels: Tensor) -> Any:
        return self.cross_entropy(logits.movedim(-1, 1), labels)

    def _by_hand(self, logits: Tensor, labels: Tensor) -> Any:
        return sharded_cross_entropy(logits, labels)

    def _summed_by_hand(self, logits: Tensor, labels: Tensor) -> Any:
        return sharded_cross_entropy(logits, labels, reduction="sum") / 256

    def _counted(self, logits: Tensor, labels: Tensor) -> Any:
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return {"loss": each.sum(), "num_tokens": (labels != -100).sum()}

    def _weighted(self, logits: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), WEIGHTS)

    def _smoothed(self, logits: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.2)

    def _summed(self, logits: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 256

    def _row_means(self, logits: Tensor, labels: Tensor) -> Any:
        return torch.stack([F.cross_entropy(*row) for row in zip(logits, labels, strict=True)]).mean()

    def _over_rows(self, logits: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / len(labels)

    def _of_all_over_rows(self, logits: Tensor, labels: Tensor) -> Any:
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return batch_sum(each) / len(labels)

    def _summed_by_hand_over_rows(self, logits: Tensor, labels: Tensor) -> Any:
        return sharded_cross_entropy(logits, labels, reduction="sum") / len(labels)

    def _ignore_zero(self, logits: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), ignore_index=0)

    def _two(self, logits: Tensor, labels: Tensor) -> Any:
        second = torch.where(labels % 2 == 0, labels, -100)
        return self._plain(logits, labels) + 0.5 * self._plain(logits * 0.5, second)

    def _two_alike(self, logits: Tensor, labels: Tensor) -> Any:
        return self._plain(logits, labels) + 0.5 * self._plain(logits * 0.5, labels)

    def _smoothed_and_weighted(self, logits: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), WEIGHTS, label_smoothing=0.2)

    def _probabilities(self, logits: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), F.one_hot(labels.clamp(min=0).flatten(), VOCAB).double())

    def _nll(self, logits: Tensor, labels: Tensor) -> Any:
        return F.nll_loss(logits.flatten(0, 1).log_softmax(-1), labels.flatten())

    def _masked_nll(self, logits: Tensor, labels: Tensor) -> Any:
        return nn.NLLLoss(WEIGHTS)(logits.movedim(-1, 1).log_softmax(1), labels)

    def _linear(self, logits: Tensor, labels: Tensor) -> Any:
        return F.linear_cross_entropy(
            logits.flatten(0, 1), torch.eye(VOCAB, dtype=torch.float64), labels.flatten(), label_smoothing=0.1
        )

    def _linear_chunks(self, logits: Tensor, labels: Tensor) -> Any:
        # Over tokens, so that no more than a few logits exist at a time.
        pieces = zip(logits.flatten(0, 1).split(5), labels.flatten().split(5), strict=True)
        head = torch.eye(VOCAB, dtype=torch.float64)
        total = sum(F.linear_cross_entropy(x, head, wanted, reduction="sum") for x, wanted in pieces)
        return total / batch_sum(labels != -100)

    def _smoothed_probabilities(self, logits: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(
            logits.flatten(0, 1), logits.detach().flip(-1).softmax(-1).flatten(0, 1), WEIGHTS, label_smoothing=0.1
        )

    def _masked_by_hand(self, logits: Tensor, labels: Tensor) -> Any:
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        return batch_mean(each, labels != -100)

    def _squared(self, logits: Tensor, labels: Tensor) -> Any:
        return (
            1e-3 * batch_mean(sequence_mean(logits.square(), labels != -100).sum(-1))
            + 0.5 * last_token(logits).square().mean()
        )

    def _squared_beside_a_mean(self, logits: Tensor, labels: Tensor) -> Any:
        # A cross entropy that is only looked at does not say how a micro-batch weighs.
        self._plain(logits, labels)
        return self._squared(logits, labels)

    def _pooled(self, logits: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(sequence_mean(logits, labels != -100), unshard(labels).amax(1))

    def _pooled_summed(self, logits: Tensor, labels: Tensor) -> Any:
        of_rows = unshard(labels).amax(1)
        return F.cross_entropy(last_token(logits), of_rows, reduction="sum") / batch_sum(of_rows)

    def _whole(self, logits: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(unshard(logits).flatten(0, 1), unshard(labels).flatten())

    def _shifted_whole(self, logits: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(unshard(logits)[:, 2:].flatten(0, 1), unshard(labels)[:, :-2].flatten())

    def _later_tokens(self, logits: Tensor, labels: Tensor) -> Any:
        later = [shift(labels, offset, -100) for offset in (0, 1, 2)]
        return sum(self._plain(logits * (1 + i), targets) for i, targets in enumerate(later)) / 3

    def _pooled_locally(self, logits: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(logits.mean(1), unshard(labels).amax(1)) + 0 * batch_sum(labels)

    def _by_name(self, logits: Tensor, labels: Tensor) -> Any:
        return cross_entropy(logits.flatten(0, 1), labels.flatten())

    def _chunks(self, logits: Tensor, labels: Tensor) -> Any:
        # Cross entropy in pieces, to save memory; and a penalty made of a reduction.
        penalty = 1e-3 * batch_mean(logits.square(), labels != -100)
        pieces = zip(logits.flatten(0, 1).split(5), labels.flatten().split(5), strict=True)
        total = sum(F.cross_entropy(*piece, reduction="sum") for piece in pieces)
        return total / batch_sum(labels != -100) + penalty

    def _of_group(self, logits: Tensor, labels: Tensor) -> Any:
        # A mean over the tokens of a group's rows: one device has another on all rows.
        each = logits.square().sum(-1)
        return 1e-3 * sequence_sum(each, labels != -100).sum() / sequence_sum(labels != -100).sum()

    def _of_group_plainly(self, logits: Tensor, labels: Tensor) -> Any:
        # sequence_parallel_size=1: whole sequences, nothing to be known of us.
        mask = labels[:, 1:] != -100
        shifted = F.cross_entropy(logits[:, 1:].flatten(0, 1), labels[:, :-1].clamp(min=0).flatten())
        pooled = F.cross_entropy(logits.mean(1), labels.amax(1)) + F.cross_entropy(logits[:, -1], labels.amax(1))
        return (logits[:, 1:].square().sum(-1) * mask).sum() / mask.sum() * 1e-3 + shifted + pooled

    def _kept(self, logits: Tensor, labels: Tensor) -> Any:
        keep = labels != -100
        return F.cross_entropy(logits[keep], labels[keep])

    def _gathered(self, logits: Tensor, labels: Tensor) -> Any:
        whole = (lambda x: x) if self._trainer is None else self.trainer.strategy.unshard
        return F.cross_entropy(whole(logits).mean(1), whole(labels).amax(1))

    def _squared_locally(self, logits: Tensor, labels: Tensor) -> Any:
        return logits.square().mean()

    def _summed_in_part(self, logits: Tensor, labels: Tensor) -> Any:
        found = at_positions(logits, torch.tensor([[0, 9, 31], [3, 4, 5]]))
        return F.cross_entropy(found.flatten(0, 1), torch.arange(6), reduction="sum")

    def _counted_at_times(self, logits: Tensor, labels: Tensor) -> Any:
        return self._plain(logits, labels) if len(self.losses) % 2 else self._masked_by_hand(logits, labels)

    def _auxiliary(self, logits: Tensor, labels: Tensor) -> Any:
        return self._plain(logits, labels) + 1e-3 * logits.square().mean()

    def _auxiliary_from_the_third_step(self, logits: Tensor, labels: Tensor) -> Any:
        return (self._auxiliary if len(self.losses) >= 2 else self._plain)(logits, labels)

    def _auxiliary_in_the_last_step(self, logits: Tensor, labels: Tensor) -> Any:
        return (self._auxiliary if len(self.losses) == 3 else self._plain)(logits, labels)

    def _shifted_by_hand(self, logits: Tensor, labels: Tensor) -> Any:
        return sharded_cross_entropy(logits[:, :-1], labels[:, 1:])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def rows_of(masks: str, size: int = 8) -> list[dict[str, Tensor]]:
    """Samples of 32 tokens whose targets are masked in a way of choice."""
    data = TokenDataset(size, 32)
    rows = [dict(data[i]) for i in range(size)]
    for index, row in enumerate(rows):
        targets = data.tokens[index, 1:].clone()
        if masks == "uneven":
            targets[: (7 * index) % 31] = -100
        if masks == "of numbers that mislead":
            # A rank keeps 16 targets, as many as it has of a row; another 2, as many as its group has rows.
            hidden = {0: slice(8, 21), 2: slice(0, 14)}.get(index % 4, slice(None))
            targets[hidden] = -100
            targets[slice(16, None) if index % 4 == 2 else slice(0)] = -100
        if masks == "empty shards":
            # The second half of a row lies on one rank of a contiguous layout.
            targets[16:] = -100
        if (
            masks == "ignored"
            or (masks == "first ignored" and index < 4)
            or (masks == "some ignored" and index in (4, 5))
        ):
            targets[:] = -100
        row["shift_labels"] = targets
    return rows


# Means over the rows of each data-parallel group, which count by their tokens.
OF_GROUPS = ("of_group", "of_group_plainly")
# Losses without a count of tokens: accumulation divides by the number of micro-batches.
UNCOUNTED = (
    "linear_chunks",
    "summed",
    "over_rows",
    "chunks",
    "row_means",
    "masked_by_hand",
    "squared",
    "squared_beside_a_mean",
)


def by_hand(kind: str, masks: str, micro: int = 2, accumulate: int = 1, size: int = 8, **_: Any) -> dict[str, Any]:
    """Return each global batch's loss and each optimizer step's gradient: the mean over all its tokens."""
    torch.set_num_threads(1)
    module = Loss(kind).double()
    rows = rows_of(masks, size)
    batches = [{n: torch.stack([r[n] for r in rows[i : i + micro]]) for n in rows[0]} for i in range(0, size, micro)]
    losses = [_mean(module, [batch])[0] for batch in batches]
    if kind in UNCOUNTED:
        # Lightning divides by what was asked for, a shorter last window too.
        each = [_mean(module, [batch])[1] for batch in batches]
        windows = [each[i : i + accumulate] for i in range(0, len(each), accumulate)]
        return {"losses": losses, "grads": [{n: sum(g[n] for g in w) / accumulate for n in w[0]} for w in windows]}
    grads = [_mean(module, batches[i : i + accumulate])[1] for i in range(0, len(batches), accumulate)]
    return {"losses": losses, "grads": grads}


def _mean(module: Loss, batches: list[Any]) -> tuple[float, dict[str, Tensor]]:
    """The loss over the concatenated batches is that over all their tokens: they have one length."""
    whole = {n: torch.cat([batch[n] for batch in batches]) for n in batches[0]}
    module.zero_grad(set_to_none=True)
    output = getattr(module, f"_{module.kind}")(module.logits(whole), whole["shift_labels"])
    total = output["loss"] / output["num_tokens"] if isinstance(output, dict) else output
    total.backward()
    return float(total.detach()), {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def fits(cases: list[dict[str, Any]], losses: type[Loss] = Loss) -> list[dict[str, Any]]:
    return [_fit(losses(case["kind"]), **case) for case in cases]


def _fit(
    module: Loss, *, kind: str, masks: str, strategy: Any = None, micro: int = 2, accumulate: int = 1, size: int = 8,
    fault: str = "", preflight: bool = False, world: int = 2,
) -> dict[str, Any]:  # fmt: skip
    options = {**(strategy or {}), "preflight": preflight}
    loader = DataLoader(rows_of(masks, size), batch_size=micro // options.get("data_parallel_size", 1))  # type: ignore[arg-type]
    error = ""
    try:
        with FAULTS[fault]() if fault else ExitStack():
            quiet_trainer(world, strategy=options, accumulate_grad_batches=accumulate).fit(module, loader)
    except SequenceParallelError as refusal:
        error = str(refusal)
    except Exception as other:
        error = f"NOT BY NAME {other!r}: {traceback.format_exc()}"
    return {"error": error, "losses": module.losses, "logged": module.logged, "grads": module.raw_grads}


# ---- what goes silently wrong elsewhere, put back


def _patches(*pairs: tuple[Any, str, Any]) -> AbstractContextManager[Any]:
    stack = ExitStack()
    for target, name, value in pairs:
        stack.enter_context(patch.object(target, name, value))
    return stack


def _local_mean() -> AbstractContextManager[Any]:
    """Each rank's own mean, averaged over the ranks."""

    def cross_entropy(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return self._originals["cross_entropy"](*args, **kwargs)

    return _patches(
        (CrossEntropyInterception, "_cross_entropy", cross_entropy),
        (LossCheck, "check", lambda *_, **__: None),
    )


def _unscaled() -> AbstractContextManager[Any]:
    """FSDP's average is not undone."""
    mirror = staticmethod(lambda ctx, *grads: (grads[0], None))
    return _patches((collectives._SumOverRanks, "backward", mirror))


def _unweighted() -> AbstractContextManager[Any]:
    """The mean of the micro-batches' means."""
    return _patches(
        (TokenWindow, "weigh", lambda self, value, counts: value),
        (TokenWindow, "close", lambda self, accumulate: None),
    )


def _nonzero_count_is(function: Callable[[Tensor], Tensor]) -> AbstractContextManager[Any]:
    return _patches((reduction, "nonzero_count", function))


FAULTS: dict[str, Any] = {
    "local mean": _local_mean,
    "gradients scaled by the group's size": _unscaled,
    "mean of micro-batch means": _unweighted,
    "nan where nothing counts": lambda: _nonzero_count_is(lambda count: count),
    "a count of at least 1": lambda: _nonzero_count_is(lambda count: count.clamp(min=1)),
}
