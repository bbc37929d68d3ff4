"""Lightning's progress bar with numbers that read at a glance."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from typing_extensions import override


class TrainingBar(TQDMProgressBar):
    """TQDM's bar without the logger's version, which is no metric, and with throughput as ``12,345``."""

    @override
    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return what the bar shows."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return {name: short(value) for name, value in metrics.items()}


def short(value: int | str | float | dict[str, float]) -> int | str | float | dict[str, float]:
    """Write a number above 1,000 without decimals and others with three digits."""
    if not isinstance(value, float):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
