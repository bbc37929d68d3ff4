"""The golden run, as each rank of any layout runs it: importable by name in the spawned ranks."""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_sp import SequenceParallelStrategy, comm
from lightning_sp.data import SequenceShardingDataModule
from lightning_sp.layout import SequenceLayout
from lightning_sp.models import CausalLM, LlamaConfig
from lightning_sp.testing import trainer_of_ranks

HERE = Path(__file__).parent
GLOBAL_BATCH, ACCUMULATION, NUM_STEPS, SEED = 4, 2, 20, 7
OPTIONS: dict[str, Any] = {
    "model": {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 48},
    "lr": 0.01,
    "warmup_steps": 3,
    "gradient_clip_val": 0.5,
    "sequence_length": 150,
    "packing": "packed",
    "last_batch": "pad",
    "held_out": 1,
}


class Recorded(CausalLM):
    """Notes, for each micro-batch, its step, its loss and this rank's number of targets; and a digest of the initial weights."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.micro_batches: list[tuple[int, float, int]] = []
        self.latest = (0, 0.0, 0)
        self.initial = ""
        self.balanced = 0

    def on_fit_start(self) -> None:
        digest = hashlib.sha256()
        for name, parameter in sorted(self.named_parameters()):
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            digest.update(name.encode() + whole.detach().cpu().numpy().tobytes())
        self.initial = digest.hexdigest()

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        info = getattr(self.trainer.strategy, "_batch", None)
        # A step finds a filler's targets, of which none counts.
        is_filler = info is not None and info.is_filler
        num_targets = 0 if is_filler else int((batch["shift_labels"] != -100).sum())
        self.latest = (self.trainer.global_step, float(loss.detach()), num_targets)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        # Not in training_step, which the preflight calls too.
        self.micro_batches.append(self.latest)
        self.balanced += bool(getattr(self.trainer.strategy, "layout", SequenceLayout()).assignment)


def step_losses(micro_batches: list[tuple[int, float, int]]) -> dict[int, float]:
    """Return each optimizer step's mean over its tokens, from all ranks' micro-batches (a micro-batch's loss is equal on all)."""
    every = comm.gather_objects(micro_batches)
    counts = [sum(rank[i][2] for rank in every) for i in range(len(micro_batches))]
    sums: dict[int, float] = {}
    totals: dict[int, int] = {}
    for (step, loss, _), count in zip(micro_batches, counts, strict=True):
        sums[step] = sums.get(step, 0.0) + loss * count
        totals[step] = totals.get(step, 0) + count
    return {step: sums[step] / totals[step] for step in sums}


def train(
    layout: tuple[int, int, int] | None,
    *,
    until: int = NUM_STEPS,
    save: str | None = None,
    resume: str | None = None,
    options: dict[str, Any] | None = None,
    strategy: dict[str, Any] | None = None,
    num_nodes: int = 1,
) -> dict[str, Any]:
    """Train the golden run on one layout.

    Args:
        layout: (dp, ring, ulysses) of the running ranks; None for one device of plain Lightning, without the strategy.
        until: last optimizer step.
        save: folder of a checkpoint to write at the end.
        resume: checkpoint to start from.
        options: in place of some of `OPTIONS`.
        strategy: further options of the strategy.
        num_nodes: over which the ranks are spread.

    Returns:
        The loss of each optimizer step, a digest of the initial weights, and how many micro-batches did not lie in zigzag.
    """
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    chosen = {**OPTIONS, **(options or {})}
    dp, ring, ulysses = layout or (1, 1, 1)
    placed: Any = SingleDeviceStrategy("cpu")
    if layout is not None:
        degrees = {"data_parallel_size": dp, "ring_size": ring, "ulysses_size": ulysses}
        # The preflight has tests of its own; here it runs in one layout, to show that it leaves no trace.
        placed = SequenceParallelStrategy(**degrees, preflight=layout == (1, 2, 2), **(strategy or {}))
    pl.seed_everything(SEED, verbose=False)
    data = SequenceShardingDataModule(
        str(HERE / "corpus.jsonl"),
        micro_batch_size=GLOBAL_BATCH // ACCUMULATION // dp,
        global_batch_size=GLOBAL_BATCH,
        seed=SEED,
        **{name: chosen[name] for name in ("sequence_length", "packing", "last_batch", "held_out")},
    )
    config = LlamaConfig(vocab_size=data.vocab_size, **chosen["model"])
    module = Recorded(model=config, lr=chosen["lr"], warmup_steps=chosen["warmup_steps"], max_steps=NUM_STEPS)
    tensor = (strategy or {}).get("tensor_parallel_size", 1)
    place = trainer_of_ranks(1 if layout is None else dp * ring * ulysses * tensor)
    if num_nodes > 1:
        place |= {"devices": dp * ring * ulysses // num_nodes, "num_nodes": num_nodes}
    trainer = pl.Trainer(
        strategy=placed,
        **place,
        precision="64-true",
        max_steps=until,
        accumulate_grad_batches=ACCUMULATION,
        gradient_clip_val=chosen["gradient_clip_val"],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    steps = step_losses(module.micro_batches)
    return {
        "losses": steps,
        "initial": module.initial,
        "epochs": trainer.current_epoch,
        "balanced": module.balanced,
    }


def several(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train several runs one after the other in one call."""
    return [train(**run) for run in runs]


def golden() -> list[float]:
    """Return the stored losses."""
    losses: list[float] = json.loads((HERE / "losses.json").read_text())["losses"]
    return losses
