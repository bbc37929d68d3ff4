"""What runs on the ranks whose checkpoints are written while training goes on."""

from __future__ import annotations

import io
import shutil
import threading
import time
import warnings
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError, SequenceParallelStrategy
from lightning_sp.checkpoint import BackgroundSaves, save_checkpoint
from lightning_sp.checkpoint.folders.folder import is_complete, partial_path
from tests.trainer.tiny import Plain, TokenDataset, tiny_llama

STEPS = 6


class User(Plain):
    def __init__(self) -> None:
        super().__init__(tiny_llama)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Dumped(pl.Callback):
    """Takes what a checkpoint holds after the second step."""

    def __init__(self) -> None:
        self.checkpoint: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.checkpoint = trainer._checkpoint_connector.dump_checkpoint(False)
            self.checkpoint["counters"] = torch.arange(3.0)


def fit(
    folder: str, callbacks: list[Any], ckpt_path: str | None = None, steps: int = STEPS, **options: Any
) -> tuple[pl.Trainer, User]:
    torch.manual_seed(0)
    trainer = pl.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), max_epochs=1, precision="64-true", logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks, default_root_dir=folder,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        strategy=SequenceParallelStrategy(preflight=False, **options),
    )  # fmt: skip
    module = User()
    trainer.fit(module, DataLoader(TokenDataset(2 * steps), batch_size=2, shuffle=True), ckpt_path=ckpt_path)
    return trainer, module


def dumped(folder: str) -> dict[str, Any]:
    taken = Dumped()
    fit(folder, [taken], steps=2)
    return taken.checkpoint


def files(path: Path) -> dict[str, Any]:
    """Return a checkpoint's tensors as bytes, and its plain values but for what callbacks say of their paths."""
    plain = torch.load(path / "meta.pt", weights_only=True)
    plain.pop("callbacks", None)
    values = tree_map(lambda value: value.tolist() if isinstance(value, torch.Tensor) else value, plain)
    return {"plain": values, **{each.name: each.read_bytes() for each in path.glob("*.distcp")}}


def copied(folder: str) -> list[bool]:
    """Save once, and copy to be written later; change everything, write, and return what of the two is equal."""
    checkpoint = dumped(folder)
    taken: list[Any] = []
    now, later = Path(folder) / "now.ckpt", Path(folder) / "later.ckpt"
    save_checkpoint(checkpoint, now, as_folder=True)
    save_checkpoint(checkpoint, later, as_folder=True, later=taken.append)
    for each in tree_leaves(checkpoint):
        if isinstance(each, torch.Tensor):
            with torch.no_grad():
                (each.to_local() if isinstance(each, DTensor) else each).mul_(-3)
    saves = BackgroundSaves()
    saves.begin(taken[0], 0)
    saves.wait(None)
    first, second = files(now), files(later)
    return [len(first) > 1, first == second]


def entries_of_one_rank(folder: str) -> list[str]:
    """Save with an entry that rank 1 alone has; return the warnings."""
    checkpoint: dict[str, Any] = {"state_dict": {}, "loops": {}, **({"mine": 1} if dist.get_rank() == 1 else {})}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        save_checkpoint(checkpoint, Path(folder) / "a.ckpt", as_folder=True)
    return [str(each.message) for each in said if "does not hold" in str(each.message)]


def one_at_a_time(folder: str) -> dict[str, Any]:
    """Begin on rank 0 alone, with an older checkpoint to be removed then; and end on both."""
    checkpoint, path = dumped(folder), Path(folder) / "newer.ckpt"
    taken: list[Any] = []
    save_checkpoint(checkpoint, path, as_folder=True, later=taken.append)
    saves, removed, found = BackgroundSaves(), [], {}
    if dist.get_rank() == 0:
        saves.begin(taken[0], 2)
        found["is_pending"] = saves.act_after(lambda: removed.append(path.exists()))
        time.sleep(0.3)
        found["before"] = (path.exists(), list(removed))
        found["may_follow"] = [
            saves.may_follow(path.with_name(name), step) for name, step in (("x", 2), ("newer.ckpt", 2), ("x", 3))
        ]
    dist.barrier()
    if dist.get_rank() == 1:
        saves.begin(taken[0], 2)
    saves.wait(None)
    found["after"] = (path.exists(), removed)
    found["is_still_pending"] = saves.act_after(lambda: removed.append(True))
    return found


def lost(folder: str) -> dict[str, Any]:
    """End by the error that another rank is gone, whose part has not come; and then have it come."""
    checkpoint, path = dumped(folder), Path(folder) / "x.ckpt"
    taken: list[Any] = []
    save_checkpoint(checkpoint, path, as_folder=True, later=taken.append)
    saves, said, found = BackgroundSaves(), io.StringIO(), {}
    if dist.get_rank() == 0:
        saves.begin(taken[0], 2)
        began = time.monotonic()
        with redirect_stderr(said):
            saves.settle(is_lost=True)
        found["seconds"] = time.monotonic() - began
    dist.barrier()
    if dist.get_rank() == 1:
        saves.begin(taken[0], 2)
        saves.settle(is_lost=False)
    dist.barrier()
    return {**found, "said": said.getvalue(), "is_complete": is_complete(path)}


def failed(folder: str) -> dict[str, Any]:
    """Lose the folder that is to be written, with an older checkpoint that a newer one would remove."""
    checkpoint, path = dumped(folder), Path(folder) / "x.ckpt"
    save_checkpoint(checkpoint, path, as_folder=True)
    before = files(path)
    taken: list[Any] = []
    removed: list[int] = []
    save_checkpoint(checkpoint, path, as_folder=True, later=taken.append)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(partial_path(path))
    dist.barrier()
    saves = BackgroundSaves()
    saves.begin(taken[0], 0)
    saves.act_after(lambda: removed.append(1))
    words = ""
    try:
        saves.wait(None)
    except SequenceParallelError as error:
        words = str(error)
    dist.barrier()
    left = sorted(each.name for each in Path(folder).iterdir())
    return {"words": words, "removed": removed, "is_whole": files(path) == before, "left": left}


def whole_run(folder: str) -> dict[str, Any]:
    """Fit with checkpoints after each step, written at once and later; return what is equal, and what a resume gives."""
    saved: dict[Any, list[dict[str, Any]]] = {}
    losses: dict[Any, list[float]] = {}
    for given in (False, True):
        where = Path(folder) / str(given)
        callback = ModelCheckpoint(dirpath=str(where), filename="{step}", every_n_train_steps=1, save_top_k=-1)
        _, module = fit(folder, [callback], asynchronous_checkpoints=given)
        paths = [where / f"step={step}.ckpt" for step in range(1, STEPS + 1)]
        saved[given], losses[given] = [files(each) for each in paths], module.losses
    _, resumed = fit(folder, [], ckpt_path=str(Path(folder) / "True" / "step=2.ckpt"))
    return {
        "same": saved[True] == saved[False],
        "losses": losses[True] == losses[False],
        "resumed": resumed.losses == losses[True][2:],
    }


def raised(folder: str) -> list[str]:
    """End a fit by an error on all ranks, just behind a save; return what is there."""

    class Raises(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                raise ArithmeticError("mine")

    callback = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    with suppress(ArithmeticError):
        fit(folder, [callback, Raises()])
    dist.barrier()
    return sorted(each.name for each in Path(folder).iterdir() if is_complete(each))


def written_at_once(folder: str) -> list[bool]:
    """Ask for a save beside the steps, where a node has so many ranks; and where the run has another reason against it."""
    found: list[bool] = []

    class Asks(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                strategy, checkpoint = trainer.strategy, trainer._checkpoint_connector.dump_checkpoint(False)
                for path, ranks in ((f"{folder}/x.ckpt", 2), (f"{folder}/x.ckpt", 10**9), ("/elsewhere/x.ckpt", 2)):
                    later = strategy._later.next_save(checkpoint, Path(path), trainer, ranks_per_node=ranks, group=None)
                    found.append(later is not None)

    class ReadsItself(ModelCheckpoint):
        pass

    class Uploads(Asks):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            _upload(trainer)

    for given, asks in (
        (ModelCheckpoint(dirpath=folder, save_last="link"), Asks()),
        (ReadsItself(dirpath=folder), Asks()),
        (ModelCheckpoint(dirpath=folder), Asks()),
        # On one rank alone, as a callback that uploads may be.
        (ModelCheckpoint(dirpath=folder), Uploads() if dist.get_rank() == 1 else Asks()),
    ):
        found.append(given.save_last == "link")
        fit(folder, [given, asks], steps=1)
    return found


def _upload(trainer: Any) -> None:
    assert trainer.checkpoint_callback.best_model_path == ""


def kept(folder: str, **options: Any) -> list[str]:
    """Fit with one checkpoint kept, and the last; return what is left."""
    callback = ModelCheckpoint(dirpath=folder, every_n_train_steps=2, save_last=True)
    fit(folder, [callback], **options)
    threads = [each.name for each in threading.enumerate() if each.name == "lightning_sp side channel"]
    return [*sorted(each.name for each in Path(folder).iterdir()), *threads]
