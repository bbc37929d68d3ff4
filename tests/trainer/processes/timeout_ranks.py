"""What `test_timeouts` runs on real ranks: two fits in a world, in which one rank is late."""

from __future__ import annotations

import os
import time

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError, SequenceParallelStrategy, comm
from lightning_sp.testing import free_port
from tests.trainer.tiny import Plain, TokenDataset, tiny_llama


class Late(Plain):
    """Rank 0 works in one hook of the first fit, or sleeps there. Each hook notes the time limits of all groups, in seconds."""

    def __init__(self, where, seconds, works):
        super().__init__(tiny_llama)
        self.where, self.seconds, self.works, self.limits = where, seconds, works, []

    def pass_by(self, where):
        cpu = torch.device("cpu")
        strategy = self.trainer.strategy
        groups = [dist.group.WORLD, *strategy.device_mesh.get_all_groups()]
        if where == "training_step":
            groups.append(strategy.sequence_mesh.ring_group)
        limits = {group._get_backend(cpu).options._timeout.total_seconds() for group in groups if group is not None}
        self.limits.append((where, sorted(limits | {comm.timeout_s()})))
        if where == self.where and dist.get_rank() == 0:
            self.where = ""
            until = time.monotonic() + self.seconds
            while self.works and time.monotonic() < until:  # as one that reads files
                time.sleep(0.1)
                sum(range(100_000))
            time.sleep(max(0.0, until - time.monotonic()))

    def setup(self, stage):
        self.pass_by("setup")

    def configure_model(self):
        self.pass_by("configure_model")
        super().configure_model()

    def training_step(self, batch, batch_idx):
        self.pass_by("training_step")
        return super().training_step(batch, batch_idx)


def fit_twice(where, seconds, options, own_world, works=True):
    """Return the error, the seconds until it, and the limits in the order of the hooks. The strategy makes the world if it is `own_world`."""
    if own_world:
        port = comm.broadcast_object(free_port(), None)
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = str(port)
    module, error, start = Late(where, seconds, works), "", time.monotonic()
    try:
        for _ in range(2):
            strategy = SequenceParallelStrategy(preflight=False, ring_size=2, **options)
            trainer = pl.Trainer(
                strategy=strategy, accelerator="cpu", devices=2, max_steps=1, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            trainer.fit(module, DataLoader(TokenDataset(4), batch_size=2))
    except SequenceParallelError as raised:
        error = str(raised)
    return error, time.monotonic() - start, module.limits
