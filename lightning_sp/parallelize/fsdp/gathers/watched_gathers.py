"""Gathers of a model's weights behind its run, under another Trainer: watched as a run is, so that a rank that does not come is named.

if trainer.is_global_zero: Trainer(devices=1).test(module)      rank 0 alone has its part of each weight alone
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_sp.parallelize.fsdp.dtensor.behind_runs import together
from lightning_sp.parallelize.fsdp.parameter_groups import fsdp_modules, parameter_groups


@contextmanager
def watched_behind_run(root: nn.Module) -> Iterator[None]:
    """Watch what other Trainers gather of a model from the run's end on, until the next one begins.

    Args:
        root: the sharded module, a LightningModule.
    """
    groups = parameter_groups(fsdp_modules(root))
    for group in groups:
        if isinstance(group._all_gather_comm, _WatchedAllGather):
            group._all_gather_comm = group._all_gather_comm.own
    trainer = getattr(root, "_trainer", None)
    strategy = None if trainer is None else weakref.ref(trainer.strategy)
    try:
        yield
    finally:
        for group in groups if strategy is not None else ():
            group._all_gather_comm = _WatchedAllGather(group._all_gather_comm, weakref.ref(root), strategy)


class _WatchedAllGather:
    """An all-gather of a unit's parameters.

    Args:
        own: FSDP2's, or what it was given.
        root: the model.
        strategy: of the run that has ended.
    """

    def __init__(self, own: Any, root: Any, strategy: Any) -> None:
        self.own, self._root, self._strategy = own, root, strategy

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return a buffer for FSDP2 to fill or to receive in."""
        buffer: Tensor = self.own.allocate(*args, **kwargs)
        return buffer

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False) -> Any:
        """Gather as FSDP2 asks for it."""
        trainer = getattr(self._root(), "_trainer", None)
        gather = partial(self.own, output_tensor=output_tensor, input_tensor=input_tensor, group=group)
        if trainer is None or trainer.strategy is self._strategy():
            return gather(async_op=async_op)
        return together(partial(_finished, gather, output_tensor, async_op=async_op))


def _finished(gather: Any, output: Tensor, *, async_op: bool) -> Any:
    """Wait for a gather where it is watched, on a GPU's stream, too."""
    work = gather(async_op=async_op)
    if work is not None:
        work.wait()
    if output.is_cuda:
        torch.cuda.synchronize(output.device)
    return work
