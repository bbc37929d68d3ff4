"""What runs in the processes: the plain reference on one, the same module under the strategy on several; plain values come back."""

from __future__ import annotations

import gc
import logging
import traceback
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError, SequenceParallelStrategy
from lightning_sp.testing import trainer_of_ranks
from lightning_sp.weights.single_numbers import in_own_shape, mark_single_numbers
from tools.models.batches import ROWS, Batches, Trial
from tools.models.images import collate
from tools.models.user import User

# Of the weights, and of what three steps changed of them; a loss function in float32 leaves about 1e-7.
LARGEST_ERROR, LARGEST_PART = 1e-6, 1e-3
# A tensor that hardly moved is measured by this part of the most that any did.
FLOOR = 1e-3
LAYOUTS = {"2x1": (2, 1), "1x2": (1, 2), "2x2": (2, 2)}


def reference(trial: Trial, file: str, seed: int = 5, precision: str = "64-true") -> dict[str, Any]:
    """Train on one device with plain Lightning, and write weights before and after to a file; return whether that ran, or why it cannot."""
    quiet()
    try:
        module = User(trial)
        before = weights_of(module)
        loader = _loader(trial, module)
        torch.manual_seed(seed)
        losses = Losses()
        _trainer(losses, strategy="auto", precision=precision).fit(module, loader)
    except Exception as error:
        return {"outcome": "not compared", "why": first_line(error), "where": traceback.format_exc()}
    after = weights_of(module)
    if not all(torch.isfinite(tensor).all() for tensor in after.values()):
        return {"outcome": "not finite", "why": "plain Lightning leaves weights that are not finite"}
    if all(torch.equal(before[name].to(tensor), tensor) for name, tensor in after.items()):
        return {"outcome": "not compared", "why": "its own step changes no weight"}
    torch.save({"before": before, "after": after, "losses": losses.found}, file)
    num_parameters = sum(p.numel() for p in module.parameters())
    return {"outcome": "ran", "num_parameters": num_parameters, "num_images": loader.dataset.num_images}


def sharded(trial: Trial, layout: str, file: str, seed: int = 5) -> dict[str, Any]:
    """Train under the strategy; return exact, wrong with its numbers, or refused with its reason. What else is raised ends the ranks."""
    quiet()
    ulysses, ring = LAYOUTS[layout]
    module = User(trial)
    loader = _loader(trial, module)
    torch.manual_seed(seed)
    strategy, losses = SequenceParallelStrategy(ulysses_size=ulysses, ring_size=ring), Losses()
    try:
        _trainer(losses, strategy=strategy, num_ranks=ulysses * ring).fit(module, loader)
    except SequenceParallelError as error:
        return {"outcome": "refused", "why": in_one_line(error)}
    expected = torch.load(file)
    said = {"why": "in the global view"} if strategy.sees_whole_sequences else {}
    return {**said, **compare(weights_of(module), losses.found, expected)}


def alarm(trial: Trial, layout: str, precision: str) -> dict[str, Any]:
    """Train under the strategy in a precision in which rounding differs, one device's too; return whether it is refused, and why."""
    quiet()
    ulysses, ring = LAYOUTS[layout]
    module = User(trial)
    torch.manual_seed(5)
    strategy = SequenceParallelStrategy(ulysses_size=ulysses, ring_size=ring)
    try:
        _trainer(strategy=strategy, num_ranks=ulysses * ring, precision=precision).fit(module, _loader(trial, module))
    except SequenceParallelError as error:
        return {"outcome": "refused", "why": in_one_line(error)}
    return {"outcome": "ran"}


def seeds_differ(trial: Trial, file: str) -> dict[str, Any]:
    """Return whether the plain step, with another seed, gives other weights than those of the file: then nothing can be compared."""
    other = f"{file}.other"
    reference(trial, other, seed=6)
    a, b = torch.load(file)["after"], torch.load(other)["after"]
    return {"outcome": "random" if any(not torch.equal(a[name], b[name]) for name in a) else "fixed"}


def compare(weights: dict[str, Tensor], losses: list[float], expected: dict[str, Any]) -> dict[str, Any]:
    """Return whether weights and losses are those of one device, with the largest error and the part of the update that is wrong."""
    before, after = expected["before"], expected["after"]
    if weights.keys() != after.keys():
        return {"outcome": "wrong", "why": f"other parameters: {sorted(weights.keys() ^ after.keys())[:3]}"}
    moved = {name: float((after[name] - before[name].to(after[name])).norm()) for name in after}
    most = max(moved.values())
    errors = {name: float((weights[name] - after[name]).abs().max()) for name in after if after[name].numel()}
    parts = {name: float((weights[name] - after[name]).norm()) / max(moved[name], FLOOR * most) for name in errors}
    largest, part = max(errors.values()), max(parts.values())
    loss_error = max((abs(a - b) for a, b in zip(losses, expected["losses"], strict=True)), default=0.0)
    numbers = {"error": largest, "part": part, "loss_error": loss_error}
    if largest <= LARGEST_ERROR and part <= LARGEST_PART and loss_error <= LARGEST_ERROR * max(map(abs, losses)):
        return {"outcome": "exact", **numbers}
    name = max(parts, key=lambda each: parts[each])
    return {
        "outcome": "wrong",
        "why": f"{name} is off by {part:.2g} of its update, the losses by {loss_error:.2g}",
        **numbers,
    }


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, with its class where it is not ours."""
    line = next(iter(str(error).strip().splitlines()), "")
    return line if isinstance(error, SequenceParallelError) else f"{type(error).__name__}: {line}"


def in_one_line(error: SequenceParallelError) -> str:
    """Return the first line of a refusal, and of that of the global view where it was tried."""
    first, *others = str(error).strip().splitlines()
    tried = next((line for line in others if line.startswith("The global view was tried")), "")
    return f"{first} {tried}".strip()


class Losses(pl.Callback):
    """Keeps the loss that each step logs; a list of the module's own would be tried at later lengths, as a counter is."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Keep it."""
        self.found.append(float(trainer.callback_metrics["train_loss"]))


def _trainer(*callbacks: pl.Callback, num_ranks: int = 1, **options: Any) -> pl.Trainer:
    options = {"precision": "64-true", **trainer_of_ranks(num_ranks), **options}
    return pl.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, callbacks=list(callbacks), **options,
    )  # fmt: skip


def _loader(trial: Trial, module: User) -> Any:
    return DataLoader(Batches(trial, module.model), batch_size=ROWS, collate_fn=collate)


def weights_of(module: pl.LightningModule) -> dict[str, Tensor]:
    """Return each parameter, whole, in float64."""
    found = {}
    mark_single_numbers(module)
    for name, parameter in module.named_parameters():
        whole: Any = parameter.detach()
        whole = in_own_shape(whole.full_tensor(), parameter) if hasattr(whole, "full_tensor") else whole
        # Plain Lightning brings a module back to the host, and shards stay on their device.
        found[name] = whole.cpu().double().clone()
    return found


def quiet() -> None:
    """Show no warning, and no line of Lightning or transformers. Frees what the run before has left."""
    gc.collect()
    gc.freeze()  # what is imported stays: to search it after each run would take a third of a run's time
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("transformers").setLevel(logging.ERROR)
