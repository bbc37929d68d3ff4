"""`model.generate` in validation_step, from the prompts of the batch; how many tokens are as they should be is logged"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        prompt = batch["input_ids"]
        written = self.model.generate(prompt, max_new_tokens=3, do_sample=False)[:, prompt.shape[1] :]
        self.log("written", written.double().mean(), sync_dist=True)
        self.log("right", (written[:, 0] == batch["shift_labels"][:, -1]).double().mean(), sync_dist=True)


def main(batch_size: int, **options: Any) -> Any:
    module = Module(llama(eos_token_id=None))
    loader = DataLoader(rows(), batch_size=batch_size)
    pl.Trainer(max_epochs=1, **options).fit(module, loader, loader)
    return module, {}
