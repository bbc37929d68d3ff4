"""Runs that are killed at random moments and resumed, some on other degrees: none may lose more than the work since its last checkpoint.

    make kills                      until 200 runs were killed; a call that is cut off goes on, its answers are in .cache/kills.json
    make kills ARGS="--kills 20"    fewer

A run writes a checkpoint every other step, so that a kill falls into the writing of one, or between two of its renames, as often as not. Killed
are all ranks at once, as by a node that is lost, or one rank. Each run is resumed from "last" until it is done, and ends with the weights of a
run that nobody killed, to 1e-8 in float64. Every other run writes its checkpoints while training goes on: its last one is the last complete one.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from tqdm import tqdm

from lightning_sp.checkpoint.folders.folder import META, is_complete
from lightning_sp.testing import RankPool, max_error
from tests.trainer.tiny import Plain, TokenDataset, _full, quiet_trainer, tiny_llama

STEPS, EVERY, TOLERANCE = 20, 2, 1e-8
# Of two ranks, with the rows of a micro-batch of each: two rows a step in all of them.
LAYOUTS: dict[str, tuple[dict[str, int], int]] = {
    "ulysses 2": (dict(ulysses_size=2), 2),
    "ring 2": (dict(ring_size=2), 2),
    "data parallel 2": (dict(data_parallel_size=2, sequence_parallel_size=1), 1),
}
# Of a run's own time, within which it is killed: some end before.
_LATEST = 1.2
# That a pool waits for a rank that says nothing once another has failed.
_OTHERS_S = 1.0


class _Notes(pl.Callback):
    """Writes down for the one who kills where a run is: a line for each event, which a kill cannot take back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def note(self, name: str, step: int) -> None:
        with (self.folder / name).open("a") as file:
            file.write(f"{step}\n")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_rank == 0:
            self.note("began", trainer.global_step)


class _Checkpoint(ModelCheckpoint):
    """Lightning's, and a note when a save has returned."""

    notes: _Notes

    def _save_last_checkpoint(self, trainer: pl.Trainer, monitor_candidates: Any) -> None:
        super()._save_last_checkpoint(trainer, monitor_candidates)
        if trainer.global_rank == 0:
            self.notes.note("saved", trainer.global_step)


def train(folder: str, layout: str, resumed: bool, later: bool) -> dict[str, torch.Tensor]:
    """Train to the end on this rank; return the weights."""
    torch.manual_seed(0)
    strategy, rows = LAYOUTS[layout]
    notes = _Notes(Path(folder))
    # A derived class's is written at once, for that may read it.
    kind = ModelCheckpoint if later else _Checkpoint
    checkpoint = kind(f"{folder}/checkpoints", save_last=True, save_top_k=1, every_n_train_steps=EVERY)
    if isinstance(checkpoint, _Checkpoint):
        checkpoint.notes = notes
    trainer = quiet_trainer(
        2, strategy=dict(**strategy, preflight=False, shard_size=2, timeout_s=20), max_steps=STEPS, enable_checkpointing=True,
        callbacks=[checkpoint, notes],
    )  # fmt: skip
    module = Plain(tiny_llama)
    data = TokenDataset(2 * STEPS)
    trainer.fit(module, DataLoader(data, batch_size=rows), ckpt_path="last" if resumed else None)
    return {name: _full(each.detach()).clone() for name, each in module.named_parameters()}


def last_saved(folder: Path) -> int:
    """Return the step of the last checkpoint that a run has saved; 0 for none. A kill may fall between a save and its note."""
    complete = [each for each in (folder / "checkpoints").glob("last*.ckpt") if is_complete(each)]
    steps = (int(torch.load(each / META, weights_only=True)["global_step"]) for each in complete)
    return max(steps, default=0)


def last_of(folder: Path, name: str) -> int:
    """Return the last step that was noted; 0 for none."""
    file = folder / name
    lines = file.read_text().split() if file.exists() else []
    return int(lines[-1]) if lines else 0


def _killed(
    folder: Path, layout: str, resumed: bool, draw: random.Random, latest_s: float, *, later: bool
) -> dict[str, torch.Tensor] | str:
    """Run, and kill at a random moment; return how, or the weights of a run that was done before."""
    before = (folder / "began").stat().st_size if (folder / "began").exists() else 0
    with RankPool(2, timeout_s=120, others_s=_OTHERS_S) as pool:
        weights: list[dict[str, torch.Tensor]] = []
        failure: list[str] = []

        def run() -> None:
            try:
                weights.extend(pool.run(train, str(folder), layout, resumed, later))
            except RuntimeError as error:
                failure.append(str(error))

        waits = threading.Thread(target=run, daemon=True)
        waits.start()
        while waits.is_alive() and not ((folder / "began").exists() and (folder / "began").stat().st_size > before):
            time.sleep(0.01)
        waits.join(draw.uniform(0, latest_s))
        if not waits.is_alive():
            if failure:
                raise RuntimeError(failure[0])
            return weights[0]
        which = draw.choice(["all ranks", "rank 0", "rank 1"])
        for rank, process in enumerate(pool._processes):
            if which in ("all ranks", f"rank {rank}"):
                process.kill()
        begin = time.monotonic()
        if which != "all ranks":
            waits.join(60)  # until the other one has failed too
        for process in pool._processes:
            process.kill()
        taken = time.monotonic() - begin - _OTHERS_S
        return which if which == "all ranks" else f"{which}; the other failed in {taken:.1f} s"


def one_run(number: int, folder: Path, expected: dict[str, torch.Tensor], latest_s: float) -> dict[str, Any]:
    """Kill a run one to three times within so many seconds of its first step, then let it end; return what is wrong, or nothing."""
    draw, later = random.Random(number), bool(number % 2)
    kills: list[dict[str, Any]] = []
    wrong: list[str] = []
    layout = draw.choice([*LAYOUTS])
    for _ in range(draw.randint(1, 3)):
        resumed = bool(kills)
        how = _killed(folder, layout, resumed, draw, latest_s, later=later)
        saved, began = max(last_saved(folder), last_of(folder, "saved")), last_of(folder, "began")
        if not isinstance(how, str):
            break
        kills.append({"how": how, "layout": layout, "began": began, "saved": saved})
        layout = draw.choice([*LAYOUTS])
    saved = max(last_saved(folder), last_of(folder, "saved"))
    with RankPool(2, timeout_s=120) as pool:
        weights = pool.run(train, str(folder), layout, True, later)[0]
    # A run that was done begins no training.
    if saved < STEPS and (began := last_of(folder, "began")) < saved:
        wrong.append(f"step {saved} was saved, and the run went on from {began}")
    error = max(max_error(each, expected[name]) for name, each in weights.items())
    if not error <= TOLERANCE:
        wrong.append(f"weights differ by {error:.1e}")
    # A run that was done saves nothing, and names what a kill has left.
    left = sorted(each.name for each in (folder / "checkpoints").iterdir() if each.suffix != ".ckpt" and saved < STEPS)
    if left:
        wrong.append(f"left in the folder: {', '.join(left)}")
    return {"kills": kills, "last": layout, "error": error, "wrong": wrong}


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 where something was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--file", type=Path, default=Path(".cache/kills.json"))
    options = parser.parse_args(argv)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    known = json.loads(options.file.read_text()) if options.file.exists() else {}
    runs: list[dict[str, Any]] = known.get("runs", []) if known.get("commit") == commit.stdout.strip() else []
    options.file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, RankPool(2, timeout_s=120) as pool:
        pool.run(train, folder, "ring 2", False, False)
        begin = time.monotonic()
        expected = pool.run(train, folder, "ulysses 2", False, False)[0]
        latest_s = _LATEST * (time.monotonic() - begin)
    done = sum(len(run["kills"]) for run in runs)
    with tqdm(total=options.kills, initial=done, unit="kill") as bar:
        while done < options.kills:
            with tempfile.TemporaryDirectory() as folder:
                runs.append(one_run(len(runs), Path(folder), expected, latest_s))
            done += len(runs[-1]["kills"])
            bar.update(len(runs[-1]["kills"]))
            options.file.write_text(json.dumps({"commit": commit.stdout.strip(), "runs": runs}, indent=1))
    wrong = [f"run {number}: {line}" for number, run in enumerate(runs) for line in run["wrong"]]
    worst = max(run["error"] for run in runs)
    print(
        f"{done} kills in {len(runs)} runs of {STEPS} steps; weights within {worst:.1e} of those of a run that nobody killed"
    )
    print("\n".join(wrong) or "nothing was lost")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
