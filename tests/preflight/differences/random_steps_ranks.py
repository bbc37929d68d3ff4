"""What each rank runs in test_random_steps.py: steps that draw random numbers; returns what was said."""

from __future__ import annotations

import random
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, distributed
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError, SequenceParallelStrategy
from lightning_sp.testing import trainer_of_ranks
from tests.flows.tiny import Tuned, llama, rows
from tests.instruments.told import told


class Random(Tuned):
    """A step that masks tokens at random (a masked diffusion), or puts noise on the embeddings (NEFTune)."""

    def __init__(self, kind: str) -> None:
        super().__init__(llama())
        self.kind = kind
        self.seldom = random.Random(3)
        self.drawn = torch.Generator().manual_seed(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        if self.kind == "noise":
            embedded = self.model.get_input_embeddings()(ids)
            most = 5 / (embedded.size(1) * embedded.size(2)) ** 0.5
            embedded = embedded + torch.zeros_like(embedded).uniform_(-most, most)
            logits = self.model(inputs_embeds=embedded).logits
            return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        if self.kind in ("seldom turned", "seldom turned by Python"):
            targets, seldom = batch["shift_labels"], self.seldom if self.kind == "seldom turned" else random
            if seldom.random() < 0.02:
                ids, targets = ids.roll(3, 1), targets.roll(3, 1)
            return F.cross_entropy(self.model(ids).logits.flatten(0, 1), targets.flatten())
        if self.kind in ("rows exchanged", "rows exchanged by torch"):
            # CutMix: of these generators the first permutation of two rows leaves them in their order.
            order = torch.randperm(len(ids), generator=self.drawn if self.kind == "rows exchanged" else None)
            first, last = 2, 6
            ids, targets = ids.clone(), batch["shift_labels"].clone()
            ids[:, first:last], targets[:, first:last] = ids[order, first:last], targets[order, first:last]
            return F.cross_entropy(self.model(ids).logits.flatten(0, 1), targets.flatten())
        share = torch.rand(ids.shape[0], 1, dtype=torch.float64) * 0.8 + 0.1
        drawn = torch.rand_like(ids, dtype=torch.float64) if self.kind == "like" else torch.rand(ids.shape)
        mask = drawn < share
        if self.kind == "each rank another" and type(ids) is not Tensor and distributed.get_rank() % 2:
            mask = ~mask
        logits = self.model(torch.where(mask, 4, ids)).logits
        losses = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
        return ((losses * mask) / share).sum() / ids.numel()


def fit(world: int, kind: str, options: dict[str, Any]) -> list[str]:
    """Return what the preflight says, and why the run is refused."""
    torch.manual_seed(3)
    refused: list[str] = []
    with told() as said, tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_steps=2, default_root_dir=folder, logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, precision="64-true", strategy=SequenceParallelStrategy(**options), **trainer_of_ranks(world),
        )  # fmt: skip
        try:
            trainer.fit(Random(kind), DataLoader(rows(), batch_size=2))
        except SequenceParallelError as error:
            refused = [f"refused: {error}"]
    return [each for each in said if each.startswith("preflight: a crop")] + refused
