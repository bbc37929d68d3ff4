"""`trainer.world_size` and `trainer.num_devices` as a line of the user's reads them: numbers of ranks, of which several share each sequence.

    steps = len(dataset) // (batch_size * self.trainer.num_devices)        of data-parallel groups, on one device and with DDP

Who talks to ranks needs the number as it is, so that it stays, with a warning.
"""

from __future__ import annotations

import linecache
import re
import sys
from abc import ABC, abstractmethod
from contextlib import suppress

import torch
from lightning.pytorch.strategies import ParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_sp.errors import SequenceParallelError
from lightning_sp.users_code.ownership import is_file_of_user

_TRAINER = "lightning.pytorch.trainer.trainer"
# `if self.trainer.world_size > 1` asks whether there are other ranks; an assertion makes nothing of it.
_IS_COMPARED = re.compile(r"^assert\b|(?:world_size|num_devices)\s*(?:[<>]|[=!]=)")


class CountedRanks(ParallelStrategy, ABC):
    """What counts ranks, to Lightning; a user's line that reads it is told what it has not counted."""

    _told: frozenset[tuple[str, int]] = frozenset()  # lines

    @property
    @abstractmethod
    def data_parallel_size(self) -> int:
        """Return how many groups of ranks read different samples."""

    @property
    @override
    def world_size(self) -> int:
        """Return the number of ranks."""
        self._tell_user()
        return super().world_size

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        """Return the devices of this host's ranks: `trainer.num_devices` counts them."""
        self._tell_user()
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, parallel_devices: list[torch.device] | None) -> None:
        self._parallel_devices = parallel_devices

    def _tell_user(self) -> None:
        frame = sys._getframe(2)
        while frame.f_globals.get("__name__") == _TRAINER and frame.f_back is not None:
            frame = frame.f_back
        line = frame.f_code.co_filename, frame.f_lineno
        if line in self._told or not is_file_of_user(frame.f_globals.get("__name__", "")):
            return
        self._told |= {line}
        text = linecache.getline(*line).strip()
        with suppress(SequenceParallelError):  # degrees that the world does not have are refused elsewhere
            size, groups = super().world_size, self.data_parallel_size
            if size != groups and not _IS_COMPARED.search(text):
                rank_zero_warn(
                    f"{line[0]}:{line[1]}: {text}: reads a number of ranks. The world has {size}, and {size // groups} of them share each "
                    "sequence: a number of steps or samples, or a learning rate, that is made of it is not one device's. "
                    f"self.trainer.strategy.data_parallel_size, {groups}, counts those that read other samples; "
                    "self.trainer.estimated_stepping_batches counts steps"
                )
