"""What `test_other_name` runs on real ranks: a fit in which one rank logs another name."""

from __future__ import annotations

import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama


class Logs(Plain):
    def __init__(self, name, **kwargs):
        super().__init__(tiny_llama)
        self.name, self.kwargs = name, kwargs

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log(self.name if batch_idx else "first", loss.detach(), **self.kwargs)
        return loss


def log(**kwargs):
    """Return the error, and the steps done."""
    trainer = quiet_trainer(2, strategy={"preflight": False}, max_steps=4)
    try:
        trainer.fit(Logs(f"rank {dist.get_rank()}", **kwargs), DataLoader(TokenDataset(8), batch_size=2))
    except SequenceParallelError as error:
        return str(error), trainer.global_step
    return "", trainer.global_step


def log_apart_and_together():
    return [log(sync_dist=True), log()]
