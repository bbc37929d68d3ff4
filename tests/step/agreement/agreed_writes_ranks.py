"""What each rank runs in test_agreed_writes.py: fits in which one rank writes to its own part of the model, or all do."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_sp.errors import SequenceParallelError
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama


def _norm(module: Any) -> Any:
    return dict(module.named_parameters())["model.norm.weight"]


def _table(module: Any) -> Any:
    return dict(module.named_parameters())["model.embedding.weight"]


def _state(optimizer: Any) -> Any:
    return next(reversed(optimizer.state.values()))


def _replace_or_drop(module: Any) -> None:
    """As a hook that drops a gradient which is not finite, by this rank's part of it, and else clips it."""
    weight = _norm(module)
    weight.grad = None if module.global_rank == 1 else weight.grad * 0.5


WRITES: dict[str, Any] = {
    "zero_grad": lambda module, optimizer: optimizer.zero_grad(),
    "zero_grad to zeros": lambda module, optimizer: optimizer.zero_grad(set_to_none=False),
    "no gradient": lambda module, _: setattr(_norm(module), "grad", None),
    "no gradient, or another": lambda module, _: _replace_or_drop(module),
    "gradient": lambda module, _: _norm(module).grad.mul_(0.5),
    "gradient's part": lambda module, _: _norm(module).grad.to_local().mul_(0.5),
    "gradient's data": lambda module, _: _norm(module).grad.data.clamp_(max=0.1),
    "gradient clipped": lambda module, _: torch.nn.utils.clip_grad_value_([_norm(module)], 1e-4),
    "weights in a list": lambda module, _: torch._foreach_mul_([_norm(module), _table(module).data], 0.5),
    "weight": lambda module, _: _norm(module).mul_(0.5),
    "weight's data": lambda module, _: _norm(module).data.mul_(0.5),
    "weight's part": lambda module, _: _norm(module).to_local().mul_(0.5),
    "weight's data's part": lambda module, _: _norm(module).data.to_local().mul_(0.5),
    "weight's detached part": lambda module, _: _norm(module).detach().to_local().mul_(0.5),
    "assigned": lambda module, _: setattr(_norm(module), "data", _norm(module).data * 0.5),
    # Of 61 rows: the last rank's part is the smaller one.
    "assigned uneven": lambda module, _: setattr(_table(module), "data", (_table(module).data * 0.5).mul_(0.9)),
    "state": lambda _, optimizer: _state(optimizer)["exp_avg"].mul_(0.5),
    "state's part": lambda _, optimizer: _state(optimizer)["exp_avg"].to_local().mul_(0.5),
    "state's step": lambda _, optimizer: _state(optimizer)["step"].add_(9),
    "state's entry": lambda _, optimizer: _state(optimizer).update(exp_avg=_state(optimizer)["exp_avg"] * 0.5),
    "state's new entry": lambda _, optimizer: _state(optimizer).update(mine=3),
    "no state": lambda _, optimizer: optimizer.state.clear(),
    "read": lambda module, _: (
        float(_norm(module).detach().to_local().sum()) + float((_norm(module).data.to_local() * 2).sum())
    ),
}


class Writing(Plain):
    """Writes in a hook of the second step, on rank 1 alone or on all ranks."""

    where, what, on_all = "", "", False
    on_before_optimizer_step = pl.LightningModule.on_before_optimizer_step  # Plain's looks at gradients

    def write(self, where: str, optimizer: Any = None) -> None:
        if where == self.where and self.global_step >= 1 and (self.on_all or self.global_rank == 1):
            with torch.no_grad():
                WRITES[self.what](self, optimizer or self.optimizers())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.write("on_train_batch_start")

    def on_train_batch_end(self, *_: Any) -> None:
        self.write("on_train_batch_end")

    def on_train_end(self) -> None:
        self.write("on_train_end")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", float(batch_idx))


class WritingBetween(Writing):
    """Has hooks between a backward and its update, too."""

    def on_after_backward(self) -> None:
        self.write("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.write("on_before_optimizer_step", optimizer)


class WritingByHand(WritingBetween):
    """Steps by hand."""

    def __init__(self, build: Any) -> None:
        super().__init__(build)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int = 0) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.write("training_step", optimizer)
        optimizer.step()


class LeavesOut(Writing):
    """One rank leaves an update out, by what it alone knows of its gradients."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.global_rank == 1 and batch_idx == 1:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


class Lookahead(torch.optim.Optimizer):
    """As libraries write it around another optimizer: it is made without the class it is of, whose hooks it has as plain dicts, or lacks."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, has_hooks: bool) -> None:
        self.optimizer, self.num_steps = optimizer, 0
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults
        if has_hooks:
            self._optimizer_step_pre_hooks = {}  # type: ignore[assignment]
            self._optimizer_step_post_hooks = {}  # type: ignore[assignment]
        self.slow = [each.detach().clone() for group in self.param_groups for each in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            fast = [each for group in self.param_groups for each in group["params"]]
            with torch.no_grad():
                for weight, slow in zip(fast, self.slow, strict=True):
                    weight.copy_(slow.add_(weight.detach() - slow, alpha=0.5))
        return loss

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)


class Wrapped(WritingBetween):
    """Steps by an optimizer around another."""

    has_hooks = True

    def configure_optimizers(self) -> Any:
        return Lookahead(super().configure_optimizers(), has_hooks=self.has_hooks)


class WrappedBare(Wrapped):
    has_hooks = False


KINDS = {
    "training_step": WritingByHand,
    **dict.fromkeys(("on_train_batch_start", "on_train_batch_end", "on_train_end"), Writing),
}


def fit(
    where: str, what: str, world: int, strategy: dict[str, Any], on_all: bool = False, kind: Any = None, **options: Any
) -> dict[str, Any]:
    """Train three steps; return what was said, and after how many steps."""
    torch.manual_seed(0)
    module: Any = (kind or KINDS.get(where, WritingBetween))(tiny_llama)
    module.where, module.what, module.on_all = where, what, on_all
    trainer = quiet_trainer(world, strategy=strategy, max_steps=3, **options)
    said = ""
    try:
        trainer.fit(module, DataLoader(TokenDataset(16), batch_size=2))
    except SequenceParallelError as error:
        said = str(error)
    return {"said": said, "steps": trainer.global_step}


def behind(folder: str, world: int, strategy: dict[str, Any], on_all: bool) -> list[str]:
    """Train, write to the weights behind that, on rank 1 or all, and save, validate and train again; return what was said each time."""
    torch.manual_seed(0)
    module, loader = Writing(tiny_llama), DataLoader(TokenDataset(4), batch_size=2)
    trainer = quiet_trainer(world, strategy=strategy, max_steps=2)
    trainer.fit(module, loader)
    if on_all or trainer.global_rank == 1:
        with torch.no_grad():
            _norm(module).mul_(0.5)
    trainer.fit_loop.epoch_loop.max_steps, trainer.fit_loop.max_epochs = 4, 2
    said = []
    acts: list[Any] = [
        lambda: trainer.save_checkpoint(f"{folder}/behind.ckpt"),
        lambda: trainer.validate(module, loader, verbose=False),
        lambda: trainer.fit(module, loader),
        # For which torch converts the weights once more.
        lambda: quiet_trainer(world, strategy=strategy, max_steps=2).fit(module, loader),
    ]
    for act in acts:
        try:
            act()
            said.append("")
        except SequenceParallelError as error:
            said.append(str(error))
    return said
