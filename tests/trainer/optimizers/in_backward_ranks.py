"""What each rank runs in test_optimizer_in_backward.py; returns plain values."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_sp.errors import SequenceParallelError
from lightning_sp.models import Llama, LlamaConfig
from lightning_sp.models.llama import rotary_angles
from lightning_sp.parallelize.fsdp.parameter_groups import fsdp_modules, parameter_groups
from lightning_sp.parallelize.memory.model_bytes import model_bytes
from lightning_sp.trainer.optimizers import optimizer_in_backward
from tests.trainer.memory.memory_options_ranks import TiedLlama
from tests.trainer.optimizers.optimizer_ranks import made
from tests.trainer.tiny import VOCAB, HuggingFaceLlama, Plain, TokenDataset, _full, quiet_trainer


class Again(Llama):
    """Runs its blocks more than once, as ALBERT does, or by a checkpoint of its own.

    Args:
        how: "twice"; "once", in a reentrant checkpoint; "reentrant", twice in one; "mixed", so once and without once; "unread", once more for an
            output that nothing reads; "looked at", once more without gradients.
    """

    def __init__(self, how: str) -> None:
        super().__init__(
            LlamaConfig(vocab_size=VOCAB, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=48)
        )
        self.how = how

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        cos, sin = rotary_angles(position_ids, head_dim=8, theta=self.config.rope_theta, dtype=x.dtype)
        for layer in self.layers:
            for number in range(1 if self.how == "once" else 2):
                x = self.run(layer, x, cos, sin, number)
        return self.head(self.norm(x))

    def run(self, layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, number: int) -> Tensor:
        if self.how in ("once", "reentrant") or (self.how == "mixed" and number == 0):
            return checkpoint(layer, x, cos, sin, use_reentrant=True)
        if number == 1 and self.how in ("unread", "looked at"):
            with torch.set_grad_enabled(self.how == "unread"):
                layer(x, cos, sin)
            return x
        return layer(x, cos, sin)


class Experts(nn.Module):
    """A layer of which each row uses one expert by its first token, and one expert nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = HuggingFaceLlama()
        for layer in self.inner.inner.model.layers:
            layer.mlp = Choice(layer.mlp)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.inner(input_ids, position_ids)


class Choice(nn.Module):
    """An MLP, and one of two linear layers for each token; a third waits."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out = self.mlp(x)
        # The first sixteenth of what a rank has goes to one of the two, so that ranks use different ones.
        chosen = x[..., 0] > x[..., 0].median()
        extra = torch.zeros_like(out)
        for number, expert in enumerate(self.experts[:2]):
            rows = (chosen if number else ~chosen) & (x[..., 1] > 0)
            if bool(rows.any()):
                extra = extra.masked_scatter(rows.unsqueeze(-1), expert(x[rows]))
        return out + extra


class Module(Plain):
    """Trains without a look at all gradients, in two groups, by an optimizer of choice with a schedule.

    Args:
        build: of the model.
        optimizer: its name.
        options: of it.
        is_penalized: whether a block's norm, which the step reads itself, is part of the loss.
    """

    on_before_optimizer_step = pl.LightningModule.on_before_optimizer_step

    def __init__(self, build: Any, optimizer: str, options: dict[str, Any], is_penalized: bool = False) -> None:
        super().__init__(build)
        self.name, self.options, self.is_penalized = optimizer, options, is_penalized
        # A unit of its own.
        self.critic = nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 1)) if build is Judged else None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.is_penalized:
            loss = loss + 0.1 * self.model.inner.model.layers[1].input_layernorm.weight.square().sum()
        return loss + self.judged() if self.critic is not None else loss

    def judged(self) -> Tensor:
        """What a critic says of two things, and how fast that changes: a gradient that has a graph."""
        seen = [torch.linspace(-1, 1, 32, dtype=torch.float64).mul(each).requires_grad_() for each in (1, 2, 3)]
        first = self.critic(seen[0]).sum()
        (slope,) = torch.autograd.grad(first, seen[0], create_graph=True)
        second, third = (self.critic(each).sum() for each in seen[1:])
        return second.square() + third.square() + first.square() + slope.square().sum()

    def configure_optimizers(self) -> Any:
        parameters = [*self.parameters()]
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        if self.options:
            optimizer = getattr(torch.optim, self.name)(groups, lr=0.01, **self.options)
        else:
            optimizer = made(self.name, [*self.parameters()] if self.name in ("LBFGS", "wrapper") else groups)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Judged(HuggingFaceLlama):
    """A model beside a critic."""


BUILDS = {
    "untied": HuggingFaceLlama,
    "judged": Judged,
    "penalized": HuggingFaceLlama,
    "tied": TiedLlama,
    "experts": Experts,
    **{how: partial(Again, how) for how in ("twice", "once", "reentrant", "mixed", "unread", "looked at")},
}


def fits(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit several in one call."""
    return [fit(**case) for case in cases]


def fit(
    world: int,
    strategy: dict[str, Any],
    build: str = "untied",
    optimizer: str = "AdamW",
    options: dict[str, Any] | None = None,
    save: str = "",
    resume: str = "",
    in_flight: int = 0,
    **trainer_options: Any,
) -> dict[str, Any]:
    """Fit; return losses, weights, the optimizer's states, and the most bytes of gradients that lived when a unit was stepped.

    Args:
        world: ranks.
        strategy: its options.
        build: of `BUILDS`.
        optimizer: of `torch.optim`, or of `made`.
        options: of the optimizer.
        save: path of a checkpoint at the end.
        resume: path of one to begin with.
        in_flight: units whose gradients may be on their way, as on a GPU.
        trainer_options: of the Trainer.
    """
    torch.manual_seed(3)
    module = Module(BUILDS[build], optimizer, options or {}, build == "penalized")
    trainer = quiet_trainer(world, strategy={"preflight": False, **strategy}, **{"max_steps": 3, **trainer_options})
    seen = Seen(module)
    with seen, mock.patch.object(optimizer_in_backward, "OptimizerInBackward", partial(InFlight, units=in_flight)):
        trainer.fit(module, DataLoader(TokenDataset(12, 32), batch_size=2), ckpt_path=resume or None, weights_only=True)
    if save:
        trainer.save_checkpoint(save)
    trainer.strategy.lightning_module_state_dict()  # frees what a reentrant checkpoint leaves whole
    names = {parameter: name for name, parameter in module.named_parameters()}
    state = trainer.optimizers[0].state
    return {
        "losses": module.losses,
        "weights": {n: _full(p.detach()).clone() for n, p in module.named_parameters()},
        "states": {
            f"{names[p]}.{key}": _full(value).clone() if isinstance(value, Tensor) else value
            for p, values in state.items()
            for key, value in values.items()
        },
        "steps": seen.steps,
        "most": seen.most,
        "units": dict(seen.units(module)),
        "predicted": model_bytes(module, [], [], torch.device("cpu"), steps_in_backward=True).gradients,
        "left": sum(p.grad is not None for p in module.parameters()),
    }


class InFlight(optimizer_in_backward.OptimizerInBackward):
    """Waits for as many units as a test says."""

    def __init__(self, *args: Any, in_flight: int, units: int) -> None:
        super().__init__(*args, in_flight=units)


class Seen:
    """Notes the parameters of each step of a part, and the gradients that are alive when it begins."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.steps, self.most = module, [], 0

    def __enter__(self) -> None:
        self._original = optimizer_in_backward.step_only

        def step_only(optimizer: Any, step: Any, chosen: Any, **options: Any) -> None:
            shards = [each for group in parameter_groups(fsdp_modules(self.module)) for each in group.fsdp_params]
            names = {each.sharded_param: each._param_fqn for each in shards}
            self.steps.append(sorted(names[each] for each in chosen))
            gradients = [each.grad.to_local().untyped_storage() for each in names if each.grad is not None]
            alive = {each.data_ptr(): each.nbytes() for each in gradients}
            self.most = max(self.most, sum(alive.values()))
            self._original(optimizer, step, chosen, **options)

        optimizer_in_backward.step_only = step_only

    def __exit__(self, *_: Any) -> None:
        optimizer_in_backward.step_only = self._original

    @staticmethod
    def units(module: nn.Module) -> list[tuple[str, int]]:
        """Return each unit's name and the bytes of its gradients on this rank, which FSDP2 pads."""
        return [
            (
                each._module_fqn or "",
                sum(p.padded_sharded_param_size.numel() * p.sharded_param.element_size() for p in each.fsdp_params),
            )
            for each in parameter_groups(fsdp_modules(module))
        ]


def stored(path: str) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint's folder by their names."""
    names = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name for name, each in names.items() if isinstance(each, TensorStorageMetadata)}
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process reads it alone
        _flatten(_load_state_dict_from_keys(tensors, checkpoint_id=path), "", found)
    return found


def _flatten(values: Any, name: str, found: dict[str, Any]) -> None:
    if isinstance(values, Tensor):
        found[name] = values
    elif isinstance(values, dict):
        for key, value in values.items():
            _flatten(value, f"{name}.{key}", found)


def not_finite(world: int, strategy: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return what is said of a loss that is not finite, without the option and with it."""
    said = []
    for on in (False, True):
        torch.manual_seed(3)
        module = Explodes(HuggingFaceLlama, "AdamW", {})
        trainer = quiet_trainer(
            world, strategy=dict(preflight=False, optimizer_in_backward=on, **strategy), max_steps=3
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, DataLoader(TokenDataset(12, 32), batch_size=2))
        said.append([str(each.message) for each in caught if "nan or infinite" in str(each.message)])
    return said[0], said[1]


class Explodes(Module):
    """Whose last norm gives infinite numbers in its second step."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.inner.model.norm.register_forward_hook(self.explode)

    def explode(self, norm: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * torch.inf if self.trainer.global_step == 1 else output


class OwnClipping(Module):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None: ...


class Looks(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None: ...


class Zeroes(Module):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class LooksBehind(pl.Callback):
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None: ...


class BackwardTwice(Module):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


class ByHand(Module):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False


class NormOfAll(torch.optim.SGD):
    """Divides each step by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([_full(each).norm() for each in gradients]).norm()
        for each in gradients:
            each.div_(norm)
        super().step()
        return loss


class Hooked(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer


class ByNormOfAll(Module):
    def configure_optimizers(self) -> Any:
        return NormOfAll(self.parameters(), lr=0.1)


def reentrant(world: int, strategy: dict[str, Any]) -> list[str]:
    """Return why reentrant checkpoints of what runs twice are refused."""
    said = []
    for how in ("reentrant", "mixed"):
        try:
            fit(world, strategy, how)
            said.append("NOT REFUSED")
        except SequenceParallelError as error:
            said.append(str(error))
    return said


def refusals(world: int, strategy: dict[str, Any], names: list[str]) -> list[str]:
    """Return why fits are refused."""
    kinds: dict[str, Any] = {
        "own clipping": OwnClipping,
        "manual": ByHand,
        "looks": Looks,
        "zeroes": Zeroes,
        "hooks": Hooked,
        "norm of all": ByNormOfAll,
        "second backward": BackwardTwice,
    }
    options: dict[str, dict[str, Any]] = {
        "accumulation": dict(accumulate_grad_batches=2),
        "clipping": dict(gradient_clip_val=0.5),
        "callback": dict(callbacks=[LooksBehind()]),
    }
    said = []
    for name in names:
        module = kinds.get(name, Module)(HuggingFaceLlama, name if name in ("LBFGS", "wrapper") else "AdamW", {})
        trainer = quiet_trainer(
            world, strategy=dict(preflight=False, optimizer_in_backward=True, **strategy), **options.get(name, {})
        )
        try:
            trainer.fit(module, DataLoader(TokenDataset(4, 32), batch_size=2))
            said.append("NOT REFUSED")
        except SequenceParallelError as error:
            said.append(str(error))
    return said
