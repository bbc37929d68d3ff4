"""One picture of a run: loss, throughput, memory per rank. Needs matplotlib (the extra ``plot``)."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_sp.errors import SequenceParallelError

_TRAIN, _VALIDATION, _LIMIT = "#3b6ea5", "#c8553d", "#7a7a7a"


@dataclass(frozen=True)
class Curve:
    """A metric as it was logged: equally many steps and values."""

    steps: Sequence[int]
    values: Sequence[float]


def read_curve(metrics_csv: Path, name: str) -> Curve:
    """Return one column of Lightning's CSV of metrics, without the rows in which it is empty."""
    with metrics_csv.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get(name)]
    return Curve([int(row["step"]) for row in rows], [float(row[name]) for row in rows])


def draw_run(
    metrics_csv: Path, picture: Path, *, title: str, peak_bytes_of_ranks: Sequence[int], memory_kind: str
) -> None:
    """Draw loss, tokens/s and each rank's peak memory, side by side.

    Raises:
        SequenceParallelError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise SequenceParallelError(
            f"the picture {picture.name} needs matplotlib: pip install 'lightning-sp[plot]'"
        ) from error
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    loss, throughput, memory = figure.subplots(1, 3, width_ratios=(1.3, 1.3, 1))
    figure.suptitle(title, fontsize=11)
    _draw_loss(loss, train=read_curve(metrics_csv, "train_loss"), validation=read_curve(metrics_csv, "val_loss"))
    _draw_throughput(throughput, read_curve(metrics_csv, "tokens_per_s"))
    _draw_memory(memory, peak_bytes_of_ranks, kind=memory_kind)
    for axes in (loss, throughput, memory):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    figure.savefig(picture, dpi=130)


def _draw_loss(axes: Any, *, train: Curve, validation: Curve) -> None:
    axes.plot(train.steps, train.values, color=_TRAIN, linewidth=1.5, label="training")
    if validation.steps:
        axes.plot(validation.steps, validation.values, color=_VALIDATION, marker="o", markersize=4, label="validation")
    axes.set(title="Loss", xlabel="optimizer step", ylabel="cross entropy (nats per token)")
    axes.legend(frameon=False)


def _draw_throughput(axes: Any, rate: Curve) -> None:
    axes.set(title="Throughput", xlabel="optimizer step", ylabel="tokens per second, all ranks")
    if not rate.steps:
        axes.text(0.5, 0.5, "too few steps to measure", ha="center", transform=axes.transAxes)
        return
    median = sorted(rate.values)[len(rate.values) // 2]
    axes.plot(rate.steps, rate.values, color=_TRAIN, linewidth=1.5)
    axes.axhline(median, color=_LIMIT, linestyle="--", linewidth=1, label=f"median {median:,.0f}")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False, loc="lower right")


def _draw_memory(axes: Any, peak_bytes_of_ranks: Sequence[int], *, kind: str) -> None:
    gib = [peak / 2**30 for peak in peak_bytes_of_ranks]
    bars = axes.bar(range(len(gib)), gib, color=_TRAIN, width=0.6)
    if len(gib) <= 16:
        axes.bar_label(bars, fmt="%.2f", padding=2)
        axes.set_xticks(range(len(gib)))
    axes.set(title="Peak memory", xlabel="rank", ylabel=f"GiB {kind}")
    axes.set_xlim(-0.75, max(1, len(gib)) - 0.25)
    axes.margins(y=0.15)
