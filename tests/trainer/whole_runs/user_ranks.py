"""Modules as users write them, each in a way of its own: what each rank runs in test_users.py."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from lightning_sp.models.gpt import GPTConfig
from tests.instruments.record import Record
from tests.trainer.lightning_ranks import trainer_of
from tests.trainer.tiny import VOCAB, Plain, TokenDataset, _full, tiny_gpt


class Written(pl.LightningModule):
    """A GPT written straight into the LightningModule: its layers are direct children, used in every way that torch allows."""

    def __init__(self, tied: bool, functional: bool) -> None:
        super().__init__()
        config = GPTConfig(vocab_size=VOCAB, dim=32, num_layers=2, num_heads=4, max_positions=64)
        self.embedding, self.positions = nn.Embedding(VOCAB, 32), nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(config.build().layers)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, VOCAB, bias=False)
        self.functional = functional
        if tied:
            self.head.weight = self.embedding.weight
        self.losses = Record()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = self.embedding(batch["input_ids"])
        x += self.positions(batch["position_ids"])
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = F.linear(x, self.head.weight) if self.functional else self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class OtherIndex(Plain):
    """nanoGPT's convention: -1 where there is no target."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.logits(batch).flatten(0, 1)
        loss = F.cross_entropy(logits, batch["targets"].flatten(), ignore_index=-1)
        self.losses.append(float(loss.detach()))
        return loss


class Counted(Plain):
    """A sum and a count by a mask of the loss; the labels are never ignored."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        each = F.cross_entropy(
            self.logits(batch).flatten(0, 1), batch["labels"].clamp(min=0).flatten(), reduction="none"
        )
        mask = batch["loss_mask"].flatten()
        return {"loss": (each * mask).sum(), "num_tokens": mask.sum()}


class Alone(Counted):
    """The same as one device's user writes it."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = super().training_step(batch, batch_idx)
        return output["loss"] / output["num_tokens"]


class Answer:
    """What a user's model returns: a class that torch knows nothing of."""

    def __init__(self, logits: Tensor) -> None:
        self.parts = {"logits": logits}


class Answering(nn.Module):
    """Returns its logits in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.body = tiny_gpt()

    def forward(self, ids: Tensor, positions: Tensor) -> Answer:
        return Answer(self.body(ids, positions))


class Answered(Plain):
    """Trains such a model."""

    def __init__(self) -> None:
        super().__init__(Answering)

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(batch["input_ids"], batch["position_ids"]).parts["logits"]


class Joined(nn.Module):
    """Returns its logits as a view: of all tokens as one dim, or without the first of each row."""

    def __init__(self, taken: bool) -> None:
        super().__init__()
        self.body, self.taken = tiny_gpt(), taken

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        logits = self.body(ids, positions) * 2
        return logits[:, 1:] if self.taken else logits.view(-1, VOCAB)


class WrittenView(Plain):
    """Writes to such logits in place, as a temperature and banned words do."""

    def __init__(self, taken: bool) -> None:
        super().__init__(lambda: Joined(taken))
        self.taken = taken

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, targets = self.logits(batch), batch["shift_labels"]
        logits /= 0.7
        logits[..., 3] -= 1.0
        loss = F.cross_entropy(logits.flatten(0, -2), (targets[:, 1:] if self.taken else targets).flatten())
        self.losses.append(float(loss.detach()))
        return loss


def shared_part() -> nn.Module:
    """Return a GPT whose two blocks hold one feed-forward norm."""
    model = tiny_gpt(num_layers=2)
    model.layers[1].feed_forward_norm = model.layers[0].feed_forward_norm
    return model


def shared_block() -> nn.Module:
    """Return a GPT that runs one block twice, as ALBERT does."""
    model = tiny_gpt(num_layers=2)
    model.layers[1] = model.layers[0]
    return model


class Experts(nn.Module):
    """Three experts, one for low tokens, one for high and one for none; each runs only if it has a token."""

    def __init__(self) -> None:
        super().__init__()
        self.body = tiny_gpt()
        self.experts = nn.ModuleList(nn.Linear(VOCAB, VOCAB) for _ in range(3))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        logits = self.body(ids, positions)
        for index, expert in enumerate(self.experts):
            chosen = (ids >= VOCAB // 2).long() == index
            if chosen.any():
                logits = logits + torch.zeros_like(logits).index_put((chosen,), expert(logits[chosen]))
        return logits


def rows(kind: str, size: int, length: int) -> list[dict[str, Tensor]]:
    """Samples in a user's own names."""
    data = TokenDataset(size, length)
    found = []
    for index in range(size):
        row = data[index]
        targets = row.pop("shift_labels")
        if kind == "other index":
            row["targets"] = targets.masked_fill(targets == -100, -1)
        elif kind == "counted":
            row |= {"labels": data.tokens[index, 1:], "loss_mask": (targets != -100).double()}
        else:
            row["shift_labels"] = targets
        if kind == "experts" and index > 1:
            # From the second batch on each half of a row is for one expert.
            row["input_ids"] = torch.arange(length) * VOCAB // length
        found.append(row)
    return found


def runs(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run several in one call."""
    return [run(**case) for case in cases]


def run(
    kind: str,
    strategy: dict[str, Any] | None,
    world: int,
    micro: int = 2,
    size: int = 5,
    length: int = 32,
    **options: Any,
) -> dict[str, Any]:
    """Fit a user's module under plain Lightning (None) or ours; losses and final weights, or the refusal."""
    torch.manual_seed(3)
    if kind.startswith("written"):
        module: Any = Written("tied" in kind, "functional" in kind)
    elif kind == "other index":
        module = OtherIndex(tiny_gpt)
    elif kind == "counted":
        module = (Alone if strategy is None else Counted)(tiny_gpt)
    elif kind == "object":
        module = Answered()
    elif kind.endswith("view"):
        module = WrittenView(kind == "taken view")
    else:
        kinds = {"experts": Experts, "shared part": shared_part, "shared block": shared_block}
        module = Plain(kinds[kind])
    declared: dict[str, Any] = {"labels_shifted": True} if kind == "counted" else {}
    declared |= {"joined view": {"loss_chunk_tokens": None}, "taken view": {"global_view": True}}.get(kind, {})
    trainer = trainer_of(None if strategy is None else {**declared, **strategy}, world, **options)
    drop_last = kind == "written, drop_last"
    try:
        trainer.fit(module, DataLoader(rows(kind, size, length), batch_size=micro, drop_last=drop_last))  # type: ignore[arg-type]
    except SequenceParallelError as error:
        return {"error": str(error), "steps": trainer.global_step}
    weights = {n: _full(p.detach()).clone() for n, p in module.named_parameters()}
    return {"error": "", "losses": module.losses, "weights": weights, "steps": trainer.global_step}
