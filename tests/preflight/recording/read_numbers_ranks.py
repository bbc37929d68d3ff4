"""What runs in the ranks: steps that decide by a number of their batch, which crop and part keep below a threshold; and some that need not."""

from __future__ import annotations

import math
import warnings
from bisect import bisect
from collections import Counter
from fractions import Fraction
from functools import partial
from math import exp
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.trainer.tiny import VOCAB, HuggingFaceLlama, Plain, TokenDataset, _full, quiet_trainer, tiny_llama

ROWS, TOKENS = 4, 16
RARE, LAST = 7, VOCAB - 1
OF_LAYERS = [
    f"{each} of a layer" for each in ("count", "array", "fraction", "sigmoid", "tokens", "experts in use", "truth")
]


class Doubling(nn.Module):
    """A block of whose layers one looks at how many tokens it has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_llama()
        for block in self.inner.layers:
            block.feed_forward.register_forward_hook(
                lambda _, __, x: 2 * x if (x.detach().norm(dim=-1) > 0).sum() > 40 else x
            )

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.inner(ids, positions)


class Bounded(nn.Module):
    """A block of whose layers one halves what has grown too large, which nothing has yet."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_llama()
        self.inner.norm.register_forward_hook(lambda _, __, x: x / 2 if float(x.detach().abs().max()) > 50 else x)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.inner(ids, positions)


class OfExperts(nn.Module):
    """A layer that halves what it is given where many numbers are large, or deals its tokens out by how many each expert has."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.experts = kind, nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "count of a layer":
                return x / 2 if int((x > -100).sum()) > 40 * 32 else x
            case "sigmoid of a layer":
                return x * (1 + torch.sigmoid(100.0 * ((x > -100).sum() - 40 * 32)))
            case "fraction of a layer":
                return x / 2 if Fraction((x > -100).sum().item(), 64 * 32) > Fraction(5, 8) else x
            case "array of a layer":
                return x / 2 if (x > -100).sum((1, 2)).numpy().sum() > 40 * 32 else x
            case "tokens of a layer":
                weights = np.ones(x.shape[:2])
                return x / 2 if (weights * (x.detach()[..., 0].numpy() > -100)).sum() > 40 else x
            case "experts in use of a layer":
                return x / len(x.detach()[..., :3].argmax(-1).unique())
            case "truth of a layer":
                return x / 2 if (x.detach()[..., 0] > 0).any() else x
        tokens = x.flatten(0, 1)
        kinds = (tokens.detach()[:, 0] * 10).long() % 3
        order, counts = kinds.argsort(stable=True), kinds.bincount(minlength=3)
        sizes, ends = counts.numpy(), [0, *counts.cumsum(0).tolist()]
        out = torch.zeros_like(tokens)
        for kind, expert in enumerate(self.experts):
            mine = (kinds == kind).nonzero()[:, 0]
            if len(mine) == 0 or sizes[kind] < 1 or not int((kinds == kind).sum()):
                continue
            if self.kind == "capacity" and len(mine) > 40:
                mine = mine[:40]
            out[mine] = expert(tokens[mine])
        places = zip(self.experts, ends[:-1], ends[1:], strict=True)
        rest = torch.cat([expert(tokens[order][a:b]) for expert, a, b in places if a != b])
        return x + (out + torch.zeros_like(out).index_put((order,), rest)).view_as(x)


class Dealing(nn.Module):
    """A model with such a layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.layer = tiny_llama(), OfExperts(kind)
        self.inner.norm = nn.Sequential(self.inner.norm, self.layer)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.inner(ids, positions)


class Deciding(Plain):
    def __init__(self, kind: str) -> None:
        models = {"hugging face": HuggingFaceLlama, "layer": Doubling, "activation": Bounded}
        models |= {each: partial(Dealing, each) for each in ("dealing", "capacity", *OF_LAYERS)}
        super().__init__(models.get(kind, tiny_llama))
        self.kind, self.many = kind, False
        self.flags: dict[str, Any] = {}

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        if self.kind == "hugging face":  # which counts positions by itself
            return self.model.inner(input_ids=batch["input_ids"]).logits
        return super().logits(batch)

    def decides(self, ids: Tensor) -> Any:
        large = ids > 20
        match self.kind:
            case "count":
                return large.sum() > 40
            case "count of a group" | "mean of a group":
                return large.sum() > 20
            case "item":
                return large.sum().item() / 2 >= 20
            case "int":
                return int(large.sum()) > 40
            case "size":
                return ids[large].shape[0] > 40
            case "rows":
                return (large.sum(1) > 14).any()
            case "numel":
                return ids.numel() >= ROWS * TOKENS
            case "product":
                rows, tokens = ids.shape
                return rows * tokens >= ROWS * TOKENS
            case "prod":
                return math.prod(ids.shape) >= ROWS * TOKENS
            case "name of a function":
                return exp(large.sum().item() / 20) > 7.4
            case "bisect":
                return bisect([40], large.sum().item())
            case "text":
                return f"{large.sum().item():03d}" > "040"
            case "key":
                return large.sum().item() in {*range(41, ROWS * TOKENS + 1)}
            case "rounds":
                return len([_ for _ in range(large.sum().item())]) > 40
            case "rare":
                return (ids == RARE).any()
            case "numpy":
                return (ids.cpu().numpy() > 20).sum() > 40
            case "array":
                return np.unique(np.asarray(ids)).size > 32
            case "set":
                return len(set(ids.flatten().tolist())) > 32
            case "counter":
                return Counter(ids.flatten().tolist()).most_common(1)[0][1] > 3
            case "number of numpy":
                return large.sum().numpy() > 40
            case "each row":
                return sum(token > 20 for row in ids for token in row.tolist()) > 40
            case "rare of Python":
                return RARE in ids.flatten().tolist()
            case "last of Python":
                return {LAST} & set(ids.flatten().tolist())
            case "both":
                return large.sum() > 40 and (ids > 10).sum() > 45
            case "one of two":
                return large.sum() > 40 and not (ids > 60).sum().item() > 40
            case "hugging face":
                return large.sum() > 40
            case "tokens":
                return ids.shape[1] > 1000
        return False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        logits = self.logits(batch)
        targets = batch["shift_labels"].flatten()
        if self.kind == "mean of a group":
            loss = F.cross_entropy(logits.flatten(0, 1), targets.clamp(min=0), reduction="none").mean()
        else:
            loss = F.cross_entropy(logits.flatten(0, 1), targets)
        match self.kind:
            case "where":
                loss = torch.where((ids > 20).sum() > 40, 2 * loss, loss)
            case "steps":
                loss = loss * (1 + (ids > 20).sum() // 41)
            case "bounded":
                loss = loss * (1 + ((ids > 20).sum() - 41).clamp(min=0, max=1))
            case "divided":
                loss = loss * (1 + (ids > 20).sum().item() // 41)
            case "weight":
                loss = loss + ((ids > 20).sum() > 40) * loss
            case "levels":
                loss = loss * [1.0, 2.0][int((ids > 20).sum()) // 41]
            case "rate":
                rate = 0.05 if (ids > 20).sum() > 40 else 0.1
                self.optimizers().param_groups[0]["lr"] = rate
            case "phase":
                loss = loss * (2 if self.many else 1)
                self.many = bool((ids > 20).sum() > 40)
            case "flag of a hook":
                self.flags["many"] = (ids > 20).sum() > 40
            case "distinct":
                self.log("distinct", float(len(set(ids.flatten().tolist()))))
                assert ids.cpu().numpy().max() < VOCAB
            case "logged":
                self.log("large", (ids > 20).sum().item())
                assert int(ids.max()) < VOCAB
            case "logits":
                loss = 2 * loss if (logits.detach().amax(-1) > -100).sum() > 40 else loss
            case "losses of tokens":
                each = F.cross_entropy(logits.detach().flatten(0, 1), ids.flatten(), reduction="none")
                loss = 2 * loss if int((each > 0).sum()) > 40 else loss
            case "loop":
                left = ids % 4
                while (left > 0).any():
                    left = left - 1
            case "broken off":
                left = ids % 4
                for _ in range(9):
                    if not (left > 0).any().item():
                        break
                    left = left - 1
            case "experts":
                loss = loss + 0.0 * self.experts(ids, logits)
            case _:
                loss = 2 * loss if self.decides(ids) else loss
        self.losses.append(float(loss.detach()))
        return loss

    def experts(self, ids: Tensor, x: Tensor) -> Tensor:
        """Add something to the tokens of each kind, of which a part may have none."""
        out = torch.zeros_like(x)
        for kind in range(3):
            mine = ids % 3 == kind
            if mine.any() and mine.sum() > 0:
                out[mine] += kind * x[mine]
        return F.cross_entropy(out.flatten(0, 1), (ids % VOCAB).flatten())

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten())
        many = self.kind == "logits" and (self.logits(batch).amax(-1) > -100).sum() > 40
        self.log("val_loss", 2 * loss if many or self.decides(batch["input_ids"]) else loss)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.logits(batch)
        if self.kind == "logits":
            return 2 * logits if (logits.amax(-1) > -100).sum() > 40 else logits
        return 2 * logits if self.decides(batch["input_ids"]) else logits

    def on_after_backward(self) -> None:
        if self.flags.get("many"):
            for parameter in self.parameters():
                parameter.grad.mul_(0.5)  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Transferred(Deciding):
    """A step whose batch a hook has changed, if it holds many of some tokens, which none of the first does."""

    def on_after_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        if (batch["input_ids"] > 20).sum() > 55:
            batch["shift_labels"][:, -6:] = -100
        return batch

    def decides(self, ids: Tensor) -> Any:
        return False


class Rarely(TokenDataset):
    """The second batch alone has the rare token, and the last one, each once. For a model that counts positions by itself it holds none."""

    def __init__(self, size: int, kind: str) -> None:
        super().__init__(size, TOKENS)
        self.has_positions = kind != "hugging face"
        self.tokens[self.tokens == RARE] = RARE + 1
        self.tokens[self.tokens == LAST] = LAST - 1
        self.tokens[ROWS, 3], self.tokens[ROWS, 4] = RARE, LAST

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        return row if self.has_positions else {name: row[name] for name in ("input_ids", "shift_labels")}


def fit(kind: str, degrees: dict[str, Any] | None, groups: int = 1) -> dict[str, Any]:
    """Train two steps; return their losses, weights, the view, and what was refused.

    Args:
        kind: of decision.
        degrees: None for one device.
        groups: data-parallel ones, whose batches one device accumulates.
    """
    torch.manual_seed(3)
    world = 1 if degrees is None else math.prod(each for name, each in degrees.items() if name.endswith("size"))
    strategy = None if degrees is None else {"global_view": "auto", **degrees}
    accumulated = groups if degrees is None else 1
    options = {"max_steps": 2, "precision": "64-true", "accumulate_grad_batches": accumulated}
    trainer, error = quiet_trainer(world, strategy=strategy, **options), ""
    module = (Transferred if kind == "transferred" else Deciding)(kind)
    try:
        trainer.fit(module, DataLoader(Rarely(2 * ROWS, kind), batch_size=ROWS // groups))
    except SequenceParallelError as refusal:
        error = str(refusal)
    weights = {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
    whole = degrees is not None and trainer.strategy.sees_whole_sequences
    return {"error": error, "losses": module.losses, "weights": weights, "whole": whole}


def evaluated(kind: str, degrees: dict[str, Any] | None) -> dict[str, Any]:
    """Validate and predict; return the loss, the predictions, the view of the validation, and what was warned of or refused."""
    torch.manual_seed(3)
    world = 1 if degrees is None else 2
    strategy = None if degrees is None else {"global_view": "auto", **degrees}
    trainer, error, predicted = quiet_trainer(world, strategy=strategy, precision="64-true"), "", []
    module, loader = (
        (Transferred if kind == "transferred" else Deciding)(kind),
        DataLoader(Rarely(2 * ROWS, kind), batch_size=ROWS),
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        [numbers] = trainer.validate(module, loader, verbose=False)
        whole = degrees is not None and trainer.strategy.sees_whole_sequences
        try:
            predicted = [each["logits"] if isinstance(each, dict) else each for each in trainer.predict(module, loader)]
        except SequenceParallelError as refusal:
            error = str(refusal)
    told = [str(each.message) for each in warned if "decides by a number" in str(each.message)]
    return {"numbers": numbers, "predicted": predicted, "whole": whole, "warned": told, "error": error}
