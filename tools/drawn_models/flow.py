"""One drawn model, its data and its run, by a seed: a flow as those of tests/flows are."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tools.drawn_models.losses import LOSSES
from tools.drawn_models.operations import OPERATIONS, WIDTH

VOCABULARY, FIRST_WORD = 42, 6
_LENGTHS = (5, 7, 9, 11, 12, 13, 16, 18, 21)


class DrawnModel(pl.LightningModule):
    """One to four operations, one behind the other, and a loss.

    Args:
        seed: of the draw.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        drawn = random.Random(seed)
        self.operations = [drawn.choice([*OPERATIONS]) for _ in range(drawn.randint(1, 3))]
        if drawn.random() < 0.4:
            self.operations.append(drawn.choice([name for name in OPERATIONS if name.startswith("attention")]))
        self.loss = drawn.choice([*LOSSES])
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(OPERATIONS[name].module() for name in self.operations)
        self.words, self.classes, self.number = (nn.Linear(WIDTH, n) for n in (VOCABULARY, 5, 1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Run the operations and the loss."""
        ids = batch["input_ids"]
        h = self.embedding(ids)
        for name, layer in zip(self.operations, self.layers, strict=True):
            h = OPERATIONS[name].run(layer, h, ids)
        loss = LOSSES[self.loss](self, h, ids, batch["shift_labels"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD: what a gradient is off by shows in a weight."""
        return torch.optim.SGD(self.parameters(), lr=0.02)


def drawn_rows(seed: int) -> list[dict[str, Tensor]]:
    """Return rows of one length, with padding and labels that do not count in some draws."""
    drawn, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    length, number = drawn.choice(_LENGTHS), drawn.choice((6, 8, 12))
    pads, ignores, rows = drawn.random() < 0.4, drawn.random() < 0.5, []
    for _ in range(number):
        words = torch.randint(FIRST_WORD, VOCABULARY, (length + 1,), generator=generator)
        ids, labels = words[:-1].clone(), words[1:].clone()
        if ignores:
            labels[torch.rand(length, generator=generator) < 0.3] = -100
        if pads and (last := int(torch.randint(length // 2 + 1, (), generator=generator))):
            ids[-last:], labels[-last:] = 0, -100
        labels[0] = words[1]  # a mean over none is no number
        rows.append({"input_ids": ids, "shift_labels": labels})
    return rows


@dataclass(frozen=True)
class DrawnFlow:
    """A run of a drawn model; as `tools.flows.registry.Flow`.

    Args:
        seed: of the draw.
    """

    seed: int

    @property
    def title(self) -> str:
        """What was drawn."""
        model = DrawnModel(self.seed)
        length = len(drawn_rows(self.seed)[0]["input_ids"])
        return f"{', '.join(model.operations)} -> {model.loss}, {length} tokens"

    @property
    def strategy_options(self) -> dict[str, Any]:
        """None: what a user gets who says nothing."""
        return {}

    def main(self, batch_size: int, **options: Any) -> DrawnModel:
        """Train; return the module."""
        drawn = random.Random(self.seed)
        torch.manual_seed(self.seed)
        module = DrawnModel(self.seed)
        # Clipped, some hardly ever: what diverges has no digits to compare.
        trainer = pl.Trainer(max_epochs=drawn.choice((1, 2)), gradient_clip_val=drawn.choice((0.5, 5.0)), **options)
        trainer.fit(module, DataLoader(drawn_rows(self.seed), batch_size=batch_size))  # type: ignore[arg-type]
        return module
