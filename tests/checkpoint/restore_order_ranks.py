"""What hooks of a resumed run see: what was called, in which order, and the weights at that moment; here and by plain Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.trainer.tiny import Plain, TokenDataset, _full, plain_trainer, quiet_trainer, tiny_llama

Seen = list[tuple[str, float]]


class Watching(Plain):
    """Trains towards the weights that it finds in `on_fit_start`, at rates of the norms that it finds in `configure_optimizers`.

    Args:
        renames: what "model." is called in its checkpoints, which have halves of all weights, too, a buffer of another name, and no teacher.
    """

    def __init__(self, *, renames: str = "") -> None:
        super().__init__(tiny_llama)
        self.renames = renames
        self.seen: Seen = []
        self.norms: list[float] = []
        self.reference: list[Tensor] = []

    def note(self, hook: str) -> None:
        self.seen.append((hook, sum(float(_full(each.detach()).abs().sum()) for each in self.parameters())))

    def configure_model(self) -> None:
        super().configure_model()
        if self.renames and not hasattr(self, "teacher"):
            self.teacher = nn.Linear(3, 5).requires_grad_(False)
            self.register_buffer("counted", torch.ones(3))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note("on_load_checkpoint")
        if self.renames:
            self._load(checkpoint)

    def _load(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        halves = [state.pop(name) for name in list(state) if name.startswith("half.")]
        self.seen.append(("halves", sum(float(_full(each).abs().sum()) for each in halves)))
        state = {name.replace(self.renames, "model."): value for name, value in state.items()}
        state["counted"] = state.pop("count")
        own = self.state_dict()
        checkpoint["state_dict"] = {**state, **{name: own[name] for name in own if name.startswith("teacher.")}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.renames:
            state = {name: value for name, value in checkpoint["state_dict"].items() if not name.startswith("teacher.")}
            halves = {f"half.{name}": value / 2 for name, value in state.items()}
            state["count"] = state.pop("counted") * 3
            names = {name: name.replace("model.", self.renames) for name in state}
            checkpoint["state_dict"] = {**{names[name]: value for name, value in state.items()}, **halves}

    def configure_optimizers(self) -> Any:
        self.note("configure_optimizers")
        self.norms = [float(_full(each.detach()).norm()) for each in self.parameters()]
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        self.seen.append(("steps to come", self.trainer.estimated_stepping_batches))
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_fit_start(self) -> None:
        self.note("on_fit_start")
        self.reference = [each.detach().clone() for each in self.parameters()]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for each, norm, reference in zip(self.parameters(), self.norms, self.reference, strict=True):
            if each.grad is not None:
                each.grad.mul_(norm).add_(each.detach() - reference, alpha=0.1)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.logits(batch).mean()

    def on_validation_start(self) -> None:
        self.note("on_validation_start")

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.logits(batch).argmax(-1)

    def on_predict_start(self) -> None:
        self.note("on_predict_start")


class Counting(Callback):
    """Notes what it has been given back of its own state, too."""

    def __init__(self) -> None:
        self.batches = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.seen.append(("setup of the callback", self.batches))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.note("on_fit_start of the callback")
        pl_module.seen.append(("batches in on_fit_start", self.batches))

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        pl_module.note("on_load_checkpoint of the callback")

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


def weights(module: Watching) -> dict[str, Tensor]:
    return {name: _full(each.detach()).clone() for name, each in module.state_dict().items()}


def trained(trainer_of: Any, micro: int, path: str, **options: Any) -> dict[str, Any]:
    """Fit an epoch and save; fit on from there in a new process' place, evaluate from there."""
    loader, stored = DataLoader(TokenDataset(8), batch_size=micro), str(Path(path))
    torch.manual_seed(3)
    first = Watching(**options)
    trainer = trainer_of(max_epochs=1, callbacks=[Counting()])
    trainer.fit(first, loader)
    trainer.save_checkpoint(stored)
    torch.manual_seed(4)
    second = Watching(**options)
    trainer = trainer_of(max_epochs=2, callbacks=[Counting()])
    trainer.fit(second, loader, ckpt_path=stored)
    found = {"weights": weights(second), "reference": [_full(each) for each in second.reference], "seen": second.seen}
    torch.manual_seed(5)
    third = Watching(**options)
    trainer = trainer_of(callbacks=[Counting()])
    trainer.validate(third, loader, ckpt_path=stored, verbose=False)
    trainer.predict(third, loader, ckpt_path=stored)
    return {**found, "evaluated": third.seen}


def ours(strategy: dict[str, Any], micro: int, path: str, options: dict[str, Any]) -> dict[str, Any]:
    world = torch.distributed.get_world_size()
    strategy = {"preflight": False, **strategy}

    def trainer_of(**given: Any) -> Any:
        return quiet_trainer(world, strategy=strategy, **given)

    return trained(trainer_of, micro, path, **options)


def plain(micro: int, path: str, options: dict[str, Any]) -> dict[str, Any]:
    return trained(plain_trainer, micro, path, **options)
