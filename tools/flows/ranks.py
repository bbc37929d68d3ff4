"""What runs in the processes: a flow on one device under plain Lightning, and the same under the strategy on several."""

from __future__ import annotations

import traceback
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_sp import SequenceParallelError, SequenceParallelStrategy
from lightning_sp.testing import trainer_of_ranks
from tools.flows.registry import Flow
from tools.models.ranks import LARGEST_ERROR, compare, first_line, quiet, weights_of

ROWS = 4
# Ranks, and options of the strategy.
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "ulysses 2": (2, {"ulysses_size": 2}),
    "ring 2": (2, {"ring_size": 2}),
    "data 2 x ring 2": (4, {"data_parallel_size": 2, "ring_size": 2}),
    "data 2": (2, {"data_parallel_size": 2}),
    "ulysses 2 x ring 2": (4, {"ulysses_size": 2, "ring_size": 2}),
}
USUAL = ("ulysses 2", "ring 2", "data 2 x ring 2")


def reference(flow: Flow, folder: str, precision: str = "64-true") -> dict[str, Any]:
    """Run a flow on one device; write what came of it to a file, or return why it cannot."""
    before: dict[str, Tensor] = {}
    fit = pl.Trainer.fit

    def noted(trainer: pl.Trainer, model: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        for name, weight in weights_of(model).items():
            before.setdefault(name, weight)
        fit(trainer, model, *args, **kwargs)

    try:
        with patch.object(pl.Trainer, "fit", noted):
            after, numbers = _run(flow, ROWS, folder, strategy="auto", num_ranks=1, precision=precision)
    except Exception as error:
        return {"outcome": "not compared", "why": first_line(error), "where": traceback.format_exc()}
    if not all(torch.isfinite(tensor).all() for tensor in after.values()):
        return {"outcome": "not compared", "why": "plain Lightning leaves weights that are not finite"}
    if all(name in before and torch.equal(before[name].to(tensor), tensor) for name, tensor in after.items()):
        return {"outcome": "not compared", "why": "its own steps change no weight"}
    before |= {name: torch.zeros_like(tensor) for name, tensor in after.items() if name not in before}
    torch.save({"before": before, "after": after, "losses": [], "numbers": numbers}, f"{folder}/reference.pt")
    return {"outcome": "ran"}


def sharded(flow: Flow, layout: str, folder: str) -> dict[str, Any]:
    """Run a flow under the strategy; return exact, wrong with its numbers, or refused with its reason. What else is raised ends the ranks."""
    num_ranks, options = LAYOUTS[layout]
    strategy = SequenceParallelStrategy(**options, **flow.strategy_options)  # type: ignore[arg-type]
    rows = ROWS // options.get("data_parallel_size", 1)
    try:
        after, numbers = _run(flow, rows, folder, strategy=strategy, num_ranks=num_ranks)
    except SequenceParallelError as error:
        return {"outcome": "refused", "why": first_line(error)}
    expected = torch.load(f"{folder}/reference.pt")
    if wrong := _differences(numbers, expected["numbers"]):
        return {"outcome": "wrong", "why": wrong}
    return compare(after, [0.0], {**expected, "losses": [0.0]})


def alarm(flow: Flow, layout: str, folder: str, precision: str) -> dict[str, Any]:
    """Run a flow under the strategy in a precision in which rounding differs, one device's too; return whether it is refused, and why."""
    num_ranks, options = LAYOUTS[layout]
    strategy = SequenceParallelStrategy(**options, **flow.strategy_options)  # type: ignore[arg-type]
    rows = ROWS // options.get("data_parallel_size", 1)
    try:
        _run(flow, rows, folder, strategy=strategy, num_ranks=num_ranks, precision=precision)
    except SequenceParallelError as error:
        return {"outcome": "refused", "why": first_line(error)}
    return {"outcome": "ran"}


def _run(
    flow: Flow, rows: int, folder: str, num_ranks: int, **options: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    quiet()
    torch.manual_seed(3)
    options = {"precision": "64-true", **trainer_of_ranks(num_ranks), **options}
    found = flow.main(
        rows, default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, **options,
    )  # fmt: skip
    module, numbers = found if isinstance(found, tuple) else (found, {})
    metrics = {name: float(value) for name, value in module.trainer.callback_metrics.items()}
    return weights_of(module), {**metrics, **numbers}


def _differences(numbers: dict[str, Any], expected: dict[str, Any]) -> str:
    if numbers.keys() != expected.keys():
        return f"other numbers: {sorted(numbers.keys() ^ expected.keys())}"
    for name, value in expected.items():
        a, b = (torch.as_tensor(each).cpu().double() for each in (numbers[name], value))
        if a.shape != b.shape:
            return f"{name} has shape {tuple(a.shape)}, on one device {tuple(b.shape)}"
        if not torch.allclose(a, b, rtol=LARGEST_ERROR, atol=LARGEST_ERROR, equal_nan=True):
            shown = (
                f"{float(a):.6g}, on one device {float(b):.6g}" if a.dim() == 0 else f"off by {(a - b).abs().max():.2g}"
            )
            return f"{name} is {shown}"
    return ""
