"""Modules, optimizers and Trainers of the user's: several Trainers in a process, saving by hand, optimizers of all kinds, exceptions."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.trainer.behaviours.harness import BEHAVIOURS, Run, behaviour, weights
from tests.trainer.behaviours.users import User, fitted, shown


@behaviour
def second_trainer_tests(run: Run) -> dict[str, Any]:
    user, trainer = User(), run.trainer()
    trainer.fit(user, run.loader())
    other = run.trainer()
    tested = other.test(user, run.loader(4, 24), verbose=False)
    return shown(trainer, user, tested=tested)


@behaviour
def second_trainer_fits(run: Run) -> dict[str, Any]:
    user = User()
    run.trainer().fit(user, run.loader())
    other = run.trainer(max_epochs=2)
    other.fit(user, run.loader())
    return shown(other, user)


@behaviour
def second_trainer_of_plain_lightning(run: Run) -> dict[str, Any]:
    """A fit by ours, then a test by plain Lightning on one device."""
    user = User()
    run.trainer().fit(user, run.loader())
    plain = Run(None, 1, run.folder).trainer()
    return {"tested": plain.test(user, run.loader(4, 24, micro=2 * run.groups), verbose=False)}


@behaviour
def fit_twice(run: Run) -> dict[str, Any]:
    user, trainer = User(), run.trainer(max_epochs=1)
    trainer.fit(user, run.loader())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(user, run.loader())
    return shown(trainer, user)


@behaviour
def validate_then_fit_then_test(run: Run) -> dict[str, Any]:
    user, trainer = User(), run.trainer()
    first = trainer.validate(user, run.loader(4, 24), verbose=False)
    trainer.fit(user, run.loader())
    return shown(trainer, user, first=first, tested=trainer.test(user, run.loader(4, 24), verbose=False))


@behaviour
def other_module_of_the_same_trainer(run: Run) -> dict[str, Any]:
    trainer, first = run.trainer(), User()
    trainer.fit(first, run.loader())
    torch.manual_seed(5)
    second = User()
    tested = trainer.test(second, run.loader(4, 24), verbose=False)
    return {"tested": tested, "first": weights(first)}


@behaviour
def torch_save_of_the_model(run: Run) -> dict[str, Any]:
    user, trainer = User(), run.trainer()
    trainer.fit(user, run.loader())
    torch.save(trainer.model, run.folder / f"whole{trainer.global_rank}.pt")
    loaded = torch.load(run.folder / f"whole{trainer.global_rank}.pt", weights_only=False)
    return {"loaded": weights(loaded)}


@behaviour
def torch_save_of_a_part(run: Run) -> dict[str, Any]:
    user, trainer = User(), run.trainer()
    trainer.fit(user, run.loader())
    torch.save(user.model, run.folder / f"part{trainer.global_rank}.pt")
    return {"saved": True}


@behaviour
def torch_save_of_the_state_dict(run: Run) -> dict[str, Any]:
    user, trainer = User(), run.trainer()
    trainer.fit(user, run.loader())
    torch.save(user.state_dict(), run.folder / f"state{trainer.global_rank}.pt")
    loaded = torch.load(run.folder / f"state{trainer.global_rank}.pt", weights_only=True)
    return {"whole": {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in loaded.items()}}


@behaviour
def deepcopy_of_the_module(run: Run) -> dict[str, Any]:
    from copy import deepcopy

    user, trainer = User(), run.trainer()
    trainer.fit(user, run.loader())
    return {"copied": weights(deepcopy(user))}


@behaviour
def parameters_that_are_dtensors_already(run: Run) -> dict[str, Any]:
    class Distributes(User):
        def configure_model(self) -> None:
            if self.model is None:
                super().configure_model()
                if run.is_ours:
                    from torch.distributed.tensor import Replicate, distribute_tensor

                    mesh = self.device_mesh["sequence_parallel"]
                    for module in list(self.modules()):
                        for name, value in list(module.named_parameters(recurse=False)):
                            shard = distribute_tensor(value.data, mesh, [Replicate()])
                            setattr(module, name, torch.nn.Parameter(shard))

    return fitted(run, Distributes())


@behaviour
def fully_shard_by_the_user(run: Run) -> dict[str, Any]:
    class Shards(User):
        def configure_model(self) -> None:
            if self.model is None:
                super().configure_model()
                if run.is_ours:
                    from torch.distributed.fsdp import fully_shard

                    fully_shard(self.model)

    return fitted(run, Shards())


def _optimizer(name: str, make: Any, **options: Any) -> None:
    class Stepping(User):
        def configure_optimizers(self) -> Any:
            return make(self.parameters())

    def run_it(run: Run) -> dict[str, Any]:
        return fitted(run, Stepping(), **options)

    BEHAVIOURS[f"optimizer {name}"] = run_it


for _name in (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "ASGD", "Adadelta", "Rprop", "Adafactor"
):  # fmt: skip
    _optimizer(_name, lambda p, n=_name: getattr(torch.optim, n)(p, lr=0.01))
_optimizer("AdamW fused", lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))
_optimizer("AdamW foreach", lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True))
_optimizer("AdamW amsgrad", lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True))
_optimizer("Adam tensor lr", lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)))
_optimizer("SGD momentum", lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True))
_optimizer("LBFGS", lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3))
_optimizer("LBFGS strong wolfe", lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"))
_optimizer("Muon", lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=0.01))
_optimizer("SparseAdam", lambda p: torch.optim.SparseAdam(p, lr=0.01))


def _of_transformers(parameters: Any) -> Any:
    from transformers import Adafactor

    return Adafactor(parameters, lr=0.01, relative_step=False, scale_parameter=False)


def _of_transformers_relative(parameters: Any) -> Any:
    from transformers import Adafactor

    return Adafactor(parameters, relative_step=True, warmup_init=True, scale_parameter=True)


_optimizer("transformers Adafactor", _of_transformers)
_optimizer("transformers Adafactor relative", _of_transformers_relative)

HOOKS = (
    "prepare_data", "setup", "configure_model", "configure_optimizers", "on_fit_start", "on_train_start", "on_train_epoch_start",
    "on_train_batch_start", "training_step", "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "optimizer_step", "on_train_batch_end", "on_train_epoch_end", "on_train_end", "on_fit_end", "teardown", "on_validation_start",
    "on_validation_epoch_start", "on_validation_batch_start", "validation_step", "on_validation_batch_end", "on_validation_epoch_end",
    "on_validation_end", "on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device", "backward",
    "configure_gradient_clipping", "on_save_checkpoint", "train_dataloader", "configure_callbacks", "lr_scheduler_step",
    "on_sanity_check_start", "optimizer_zero_grad",
)  # fmt: skip


def failing(hook: str, run: Run, ranks: tuple[int, ...]) -> dict[str, Any]:
    """Fit with a hook that raises on some ranks; return the error and the seconds that it took."""
    import torch.distributed as dist

    rank = dist.get_rank() if run.is_ours else 0

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        if rank in ranks:
            raise RuntimeError(f"the user's {hook} failed")
        parent = getattr(User, hook, None)
        if hook == "train_dataloader":
            return run.loader()
        return parent(self, *args, **kwargs) if parent else None

    module = type("Failing", (User,), {hook: fail})()
    trainer = run.trainer(num_sanity_val_steps=1)
    start = time.monotonic()
    try:
        loaders = dict(val_dataloaders=run.loader(4, 24))
        if hook != "train_dataloader":
            loaders["train_dataloaders"] = run.loader()
        trainer.fit(module, **loaders)
        if hook == "on_save_checkpoint":
            trainer.save_checkpoint(run.folder / "x.ckpt")
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"[:400], "seconds": time.monotonic() - start}
    return {"error": "", "seconds": time.monotonic() - start}


def fails(hook: str, ranks: tuple[int, ...], strategy: Any, world: int, folder: str) -> dict[str, Any]:
    """One of the above."""
    import warnings
    from pathlib import Path

    warnings.filterwarnings("ignore")
    return failing(hook, Run(strategy, world, Path(folder)), ranks)


assert DTensor
