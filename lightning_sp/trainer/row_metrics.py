"""torchmetrics of batches that the ranks of a sequence hold alike: each row counts once, so data-parallel groups alone are added up.

Metrics of tokens, which each rank has some of, are added up over the world. A metric that names its own ranks keeps them.
"""

from __future__ import annotations

from torch import nn
from torch.distributed import ProcessGroup
from torchmetrics import Metric


class RowMetrics:
    """The ranks over which a run's metrics add up; a class because they follow the batches."""

    def __init__(self) -> None:
        self._changed: list[Metric] = []
        self._group: ProcessGroup | None = None

    def follow(self, module: nn.Module, group: ProcessGroup | None) -> None:
        """Let metrics that name no ranks add up over one rank of each data-parallel group, over those of all tokens, or over the world again.

        Args:
            module: that holds them.
            group: the ranks with other rows, in a batch of rows; in one of tokens those that hold each token once, None where these are all;
                None at the end of a run.
        """
        if group is self._group:
            return
        for each in self._changed:
            each.process_group = None
        self._changed, self._group = [], group
        if group is not None:
            self._changed = [
                each for each in module.modules() if isinstance(each, Metric) and each.process_group is None
            ]
        for each in self._changed:
            each.process_group = group
