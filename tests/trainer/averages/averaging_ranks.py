"""What each rank runs in test_weight_averaging.py; returns plain values."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from lightning.pytorch import callbacks
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.trainer.lightning_ranks import User, trainer_of
from tests.trainer.tiny import TokenDataset, _full

AVERAGES: dict[str, dict[str, Any]] = {
    "EMAWeightAveraging": dict(decay=0.6),
    "WeightAveraging": {},
    "StochasticWeightAveraging": dict(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=2, device=None),
}


class OwnSetup(callbacks.WeightAveraging if hasattr(callbacks, "WeightAveraging") else callbacks.Callback):  # type: ignore[misc]
    """An average whose user does more when it is set up."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)


class Growing(User):
    """A module with a buffer that each batch changes: WeightAveraging averages it too, or takes the last."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(3))

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.steps += torch.arange(3)


def trained(
    name: str, strategy: dict[str, Any] | None, rows: int, precision: str, epochs: int, save: str = "", resume: str = ""
) -> dict[str, Any]:
    """Fit with an average, validated in each epoch; return the weights it ends with, what was logged, and where setup is."""
    torch.manual_seed(11 if not resume else 12)
    module = Growing()
    if name == "StochasticWeightAveraging":
        module.configure_model()  # plain Lightning averages nothing of what is built later
    average = getattr(callbacks, name)(**AVERAGES[name])
    saved = [callbacks.ModelCheckpoint(save, "{epoch}", save_top_k=-1)] if save else []
    world = torch.distributed.get_world_size() if strategy else 1
    trainer = trainer_of(
        strategy, world, callbacks=[average, *saved], max_epochs=epochs, precision=precision, enable_checkpointing=bool(save)
    )  # fmt: skip
    loaders = [DataLoader(TokenDataset(8), batch_size=rows) for _ in range(2)]
    trainer.fit(module, *loaders, ckpt_path=resume or None)
    weights = {
        n: _full(p.detach()).double().clone() for n, p in chain(module.named_parameters(), module.named_buffers())
    }
    copied = [*average._average_model.parameters()]
    local = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in copied)
    trainer.validate(module, loaders[1], verbose=False)
    return {
        "weights": weights,
        "logged": module.validated,
        "numbers": local,
        "setup": "setup" in vars(average),
        "dtype": str(copied[0].dtype),
    }


def best(strategy: dict[str, Any] | None, folder: str) -> list[float]:
    """Fit with an average, then validate the best checkpoint by the same Trainer; return what it measured."""
    torch.manual_seed(11)
    module = User()
    saved = callbacks.ModelCheckpoint(folder, monitor="val_mean")
    world = torch.distributed.get_world_size() if strategy else 1
    trainer = trainer_of(
        strategy, world, callbacks=[callbacks.EMAWeightAveraging(decay=0.6), saved], max_epochs=2, enable_checkpointing=True
    )  # fmt: skip
    loaders = [DataLoader(TokenDataset(8), batch_size=4) for _ in range(2)]
    trainer.fit(module, *loaders)
    trainer.validate(module, loaders[1], ckpt_path="best", verbose=False)
    return [each["val_mean"] for each in module.validated]


def stored(path: str) -> list[str]:
    """The names of what a folder holds in shards."""
    return sorted(FileSystemReader(path).read_metadata().state_dict_metadata)


def own_setup() -> str:
    """Fit with a callback whose setup is the user's; return the refusal."""
    try:
        trainer_of({"ring_size": 2}, 2, callbacks=[OwnSetup()]).fit(User(), DataLoader(TokenDataset(4), batch_size=2))
    except SequenceParallelError as error:
        return str(error)
    return "not refused"
