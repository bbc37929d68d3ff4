"""Peak memory, per rank: what a rank's device allocated, or on a CPU what its process held resident.

The two are different quantities, so each comes with its name. A process's peak counts from its start, torch's own
libraries included, and cannot be reset; CUDA's counts from the beginning of the fit.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

GIB = 2**30


def peak_resident_bytes() -> int:
    """Return the most memory this process ever held resident.

    Source: VmHWM of /proc/self/status, which a child process does not inherit; elsewhere than on Linux, getrusage.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_bytes(device: torch.device) -> int:
    """Return this rank's peak on its device."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()


def describe_peak(device: torch.device) -> str:
    """Say what `peak_bytes` measures on this device."""
    return "allocated by torch on the GPU" if device.type == "cuda" else "resident in the process"


class MemoryMonitor(Callback):
    """Log this rank's peak at every logged step, and the least and greatest over the ranks at each epoch's end.

    Logs: ``peak_memory_gib`` (rank 0's, in the progress bar), ``peak_memory_min_gib`` and ``peak_memory_max_gib``. After
    the fit `peak_bytes_of_ranks` holds every rank's, in their order.

    Communicates: an all-reduce of one number per rank, at each training epoch's end and at the fit's.
    """

    def __init__(self) -> None:
        self.peak_bytes_of_ranks: list[int] = []
        self.description = ""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count, where that can be begun."""
        device = trainer.strategy.root_device
        self.description = describe_peak(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log this rank's peak so far."""
        if trainer._logger_connector.should_update_logs:
            pl_module.log("peak_memory_gib", peak_bytes(trainer.strategy.root_device) / GIB, prog_bar=True)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the ranks."""
        self._gather(trainer)
        # Equal on all ranks already; without sync_dist Lightning warns.
        pl_module.log("peak_memory_min_gib", min(self.peak_bytes_of_ranks) / GIB, sync_dist=True)
        pl_module.log("peak_memory_max_gib", max(self.peak_bytes_of_ranks) / GIB, sync_dist=True)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather every rank's peak, for the report."""
        self._gather(trainer)

    def _gather(self, trainer: Trainer) -> None:
        device = trainer.strategy.root_device
        # A sum of vectors with one entry each: Lightning's own all_gather calls a function that torch 2.13 deprecates.
        peaks = torch.zeros(trainer.world_size, dtype=torch.int64, device=device)
        peaks[trainer.global_rank] = peak_bytes(device)
        gathered: torch.Tensor = trainer.strategy.reduce(peaks, reduce_op="sum")
        self.peak_bytes_of_ranks = [int(peak) for peak in gathered.tolist()]
