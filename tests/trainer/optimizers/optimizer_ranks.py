"""What each rank runs in test_optimizers.py; returns plain values."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import DataLoader

from lightning_sp.trainer.optimizers import optimizer_trial
from lightning_sp.trainer.optimizers.optimizer_trial import Verdict
from tests.trainer.tiny import Plain, TokenDataset, _full, plain_trainer, quiet_trainer, tiny_llama


class NormOfShards(torch.optim.Optimizer):
    """Unwraps sharded tensors itself, and divides each step by the norm of what it finds."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                weight, gradient = (t.to_local() if isinstance(t, DTensor) else t for t in (parameter, parameter.grad))
                if gradient.numel():
                    weight.add_(gradient / (gradient.norm() + 1e-8), alpha=-group["lr"])
        return loss


class Wrapper(torch.optim.Optimizer):
    """Holds an optimizer of the same parameters, and is not made of its defaults."""

    def __init__(self, params: Any, kind: Any, lr: float = 0.1) -> None:
        params = list(params)
        super().__init__(params, {"lr": lr})
        self.inner = kind(params, lr=lr)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)


def made(name: str, parameters: Any) -> Any:
    """Make an optimizer by its name."""
    if name == "hugging face":
        from transformers import Adafactor

        return Adafactor(parameters, lr=0.01, scale_parameter=True, relative_step=False)
    if name == "LBFGS":
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)
    if name == "wrapper":
        return Wrapper(parameters, torch.optim.Rprop)
    own = {"norm of shards": NormOfShards}
    return (own.get(name) or getattr(torch.optim, name))(parameters, lr=0.01)


class Module(Plain):
    """Trains by an optimizer of choice, with a schedule."""

    def __init__(self, name: str, manual: bool = False, reads_states: bool = False) -> None:
        # Without biases: the gradient of an attention key's bias is rounding alone, which Adafactor would make a step of.
        super().__init__(tiny_llama)
        self.name, self.automatic_optimization, self.reads_states = name, not manual, reads_states

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.reads_states:  # behind the forward, where the head is whole, and a block's weight is not
            states = self.optimizers().state
            weights = self.model.head.weight, self.model.layers[0].feed_forward.down.weight
            loss = loss * (1 + sum(float(states[each]["exp_avg"].abs().sum()) for each in weights if each in states))
            assert [states.get(each) is None for each in weights] == [each not in states for each in weights]
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step()
            return None
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = made(self.name, self.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fits(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit several in one call."""
    return [fit(**case) for case in cases]


def fit(
    name: str,
    world: int = 1,
    strategy: dict[str, Any] | None = None,
    manual: bool = False,
    save: str = "",
    resume: str = "",
    reads_states: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Fit with an optimizer; return the weights and what was said.

    Args:
        name: of `made`.
        world: ranks.
        strategy: its options.
        manual: step it by hand.
        save: path of a checkpoint at the end.
        resume: path of one to begin with.
        reads_states: scale each loss by what the optimizer has of two weights.
        options: of the Trainer.
    """
    torch.manual_seed(0)
    module = Module(name, manual, reads_states)
    loader = DataLoader(TokenDataset(6), batch_size=2 // (strategy or {}).get("data_parallel_size", 1))
    trainer = quiet_trainer(world, strategy=strategy, **{"max_epochs": 1, **options})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader, ckpt_path=resume or None, weights_only=True)
        if save:
            trainer.save_checkpoint(save)
    state = trainer.strategy.lightning_module_state_dict()
    said = [str(each.message) for each in caught]
    return {
        "weights": {n: _full(v.detach()).clone() for n, v in state.items()},
        "said": [each for each in said if "step sharded weights" in each or "could not be tried" in each],
        "warned": [each for each in said if "lr_scheduler.step()" in each],
        "sharded": all(
            isinstance(value, DTensor)
            for parameter, values in trainer.optimizers[0].state.items()
            for value in values.values()
            if isinstance(value, torch.Tensor) and isinstance(parameter, DTensor) and value.shape == parameter.shape
        ),
    }


def verdicts(names: list[str]) -> list[Verdict]:
    """Return how each optimizer's trial on this mesh ends, those known to be elementwise included, and that it moved nothing."""
    # A group of its own: what other tests' failures have left in the world's would be taken for this one's.
    shape = (1, torch.distributed.get_world_size())
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("alone", "shard"))["shard"]
    values = [torch.arange(10.0).view(5, 2), torch.arange(3.0)]
    parameters = [torch.nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])) for value in values]
    found = []
    for name in names:
        optimizer = made(name, parameters)
        found.append(optimizer_trial._trial(optimizer))
        for parameter, value in zip(parameters, values, strict=True):
            assert torch.equal(parameter.full_tensor(), value), (name, parameter.full_tensor(), value)
    return found


class Rewriting(Module):
    """Takes out, sets and deletes states by the weights that its step sees, behind the forward, where the head is whole."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        states, weights = self.optimizers().state, (self.model.head.weight, self.model.layers[0].feed_forward.up.weight)
        for weight in weights if batch_idx else ():
            if batch_idx == 1:
                loss = loss * (1 + len(states.pop(weight)) + len(states.pop(weight, "")))
            else:
                loss = loss * (1 + len(states.setdefault(weight, {})) + len(states.copy()))
                if weight is weights[0] and batch_idx == 2:
                    states[weight] = {name: value * 0 for name, value in states[weight].items()}
                else:
                    del states[weight]
        return loss


def rewritten(world: int, strategy: dict[str, Any] | None) -> tuple[list[float], dict[str, Any], int]:
    """Return the losses, the weights and the number of states of a fit whose steps write to its optimizer's states."""
    torch.manual_seed(0)
    module = Rewriting("AdamW")
    trainer = quiet_trainer(world, strategy=strategy, max_epochs=2) if strategy else plain_trainer(max_epochs=2)
    trainer.fit(module, DataLoader(TokenDataset(6), batch_size=2))
    weights = {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
    return module.losses, weights, len(trainer.optimizers[0].state)
