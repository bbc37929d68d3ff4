"""Several Trainers in a process, and what users do with the module besides."""

from __future__ import annotations

from typing import Any

import torch

from tests.trainer.behaviours.harness import Run, behaviour, weights
from tests.trainer.behaviours.users import User, fitted, shown


@behaviour
def second_trainer_tests(run: Run) -> dict[str, Any]:
    user, trainer = User(), run.trainer()
    trainer.fit(user, run.loader())
    other = run.trainer()
    tested = other.test(user, run.validation(4, 24), verbose=False)
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
    first = trainer.validate(user, run.validation(4, 24), verbose=False)
    trainer.fit(user, run.loader())
    return shown(trainer, user, first=first, tested=trainer.test(user, run.validation(4, 24), verbose=False))


@behaviour
def other_module_of_the_same_trainer(run: Run) -> dict[str, Any]:
    trainer, first = run.trainer(), User()
    trainer.fit(first, run.loader())
    torch.manual_seed(5)
    second = User()
    tested = trainer.test(second, run.validation(4, 24), verbose=False)
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
