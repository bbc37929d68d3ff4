"""What each rank runs in test_balance.py: importable by name in the spawned ranks; returns plain values."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch.utils.data import DataLoader

from lightning_sp import shard, unshard
from lightning_sp.trainer import log_once
from tests.trainer.scenarios import Evaluated
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama


def predicted(world: int, options: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Predict with an untrained model: tokens and the best next ones, whole."""
    torch.manual_seed(3)
    module = Evaluated(tiny_llama)
    trainer = quiet_trainer(world, strategy={"packed_documents": True, **options})
    dataset = TokenDataset(**data)
    found = trainer.predict(module, DataLoader(dataset, batch_size=2))
    assert found is not None
    return {
        **{name: torch.cat([each[name] for each in found]) for name in found[0]},
        "whole": dataset.tokens[:, :-1],
        "assigned": bool(trainer.strategy.layout.assignment),
    }


class ByHand(Plain):
    """Shards and gathers in training_step by the layout of the batch in progress."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        placed = self.trainer.strategy
        whole = placed.unshard(batch["input_ids"])
        self.seen = unshard(batch["input_ids"], placed.layout, placed.sequence_mesh.sequence_group)
        self.again = torch.equal(
            shard(whole, placed.sequence_mesh.layout, placed.sequence_mesh.sequence_rank, dim=1), batch["input_ids"]
        )
        return super().training_step(batch, batch_idx)


def by_hand(world: int, options: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Fit one step: the tokens that a user's own gathering gave, and what the strategy said of the layout."""
    torch.manual_seed(3)
    module = ByHand(tiny_llama)
    dataset = TokenDataset(**data)
    with mock.patch.object(log_once, "rank_zero_info") as said:
        trainer = quiet_trainer(world, max_steps=2, strategy={"packed_documents": True, "preflight": False, **options})
        trainer.fit(module, DataLoader(dataset, batch_size=len(dataset)))
    lines = [call.args[0] for call in said.call_args_list if "packed documents" in call.args[0]]
    return {
        "seen": module.seen,
        "again": module.again,
        "whole": dataset.tokens[:, :-1],
        "lines": lines,
        "layout": module.layouts[-1],
    }
