"""torchdata's StatefulDataLoader as the training loader."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import Dataset

from tests.flows.tiny import VOCABULARY, Tuned, llama


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(6, VOCABULARY, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from torchdata.stateful_dataloader import StatefulDataLoader

    module = Tuned(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, StatefulDataLoader(Rows(), batch_size=batch_size))
    return module
