"""What a step is made by, learning rates, clipping and which modules drop out, is the same on all ranks: compared while the backward runs.

Each rank updates the shards that it has. One with another learning rate trains its part of every matrix by that, without a word: nothing
else of the run differs between ranks, and no replica is there to be compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn, tensor
from torch.distributed import ProcessGroup
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.parameter_names import shown, user_name

# What learning rate schedulers keep in a group, beside an optimizer's own.
_OF_SCHEDULERS = ("lr", "initial_lr", "max_lr", "min_lr", "momentum", "betas", "weight_decay")


class AgreedUpdate:
    """Compares what ranks are about to step by; a class because it is asked before a backward and answered behind it."""

    def __init__(self) -> None:
        self._told: comm.Largest | None = None
        self._numbers: dict[str, Any] = {}

    def start(self, optimizers: Sequence[Optimizer], root: nn.Module, group: ProcessGroup | None) -> None:
        """Begin a fit, whose model is sharded and in no step. Every rank must call it.

        Communicates: one all_reduce of 16 bytes on the host.

        Raises:
            SequenceParallelError: ranks have other optimizers, or other weights in them.
        """
        own = members(optimizers, root)
        if not comm.all_equal(tensor([comm.digest_of(own)]), group):
            raise SequenceParallelError(_difference(comm.gather_objects(own, group)))

    def tell(
        self,
        optimizers: Sequence[Optimizer],
        step: int,
        group: ProcessGroup | None,
        *,
        root: nn.Module,
        clipping: Mapping[str, Any],
    ) -> None:
        """Tell the other ranks, without a wait. Every rank must call it, before the backward that an update follows.

        Args:
            optimizers: all of the run.
            step: optimizer steps so far.
            group: the world, on a backend for host tensors.
            root: the model, whose forward has been.
            clipping: how gradients are clipped, by name.

        Communicates: one all_reduce of 16 bytes on the host.
        """
        if comm.size_of(group or comm.world()) == 1:
            return
        self._numbers = {"optimizer steps so far": step, **hyperparameters(optimizers), **clipping, **evaluating(root)}
        digest = comm.digest_of(self._numbers)
        self._told = comm.Largest(tensor([digest, -digest]), group)

    def check(self, group: ProcessGroup | None) -> None:
        """Read the answer, before the update. Every rank must call it.

        Raises:
            SequenceParallelError: ranks would step by other numbers.
        """
        told, self._told = self._told, None
        if told is None:
            return
        highest, lowest = told.arrived().tolist()
        if highest != -lowest:
            raise SequenceParallelError(_difference(comm.gather_objects(self._numbers, group)))


def hyperparameters(optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return what optimizers step by, by name: numbers and flags of their groups, not what a user has noted there.

    Tensors on a device are left out: they are not waited for.
    """
    found: dict[str, Any] = {}
    for number, optimizer in enumerate(optimizers):
        for group, options in enumerate(optimizer.param_groups):
            found[f"number of weights of optimizer {number}, group {group}"] = len(options["params"])
            for name, value in options.items():
                if name not in optimizer.defaults and name not in _OF_SCHEDULERS:
                    continue  # a note of the user's
                if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
                    value = value.item()
                numbers = value if isinstance(value, tuple) else (value,)
                if all(isinstance(each, (bool, int, float)) for each in numbers):
                    found[f"{name} of optimizer {number}, group {group}"] = value
    return found


def members(optimizers: Sequence[Optimizer], root: nn.Module) -> dict[str, str]:
    """Return of which class optimizers are, and which weights are in which of their groups, each with options of its own.

    A script that splits weights by a set of names has them in another order on each rank, unless PYTHONHASHSEED is set.
    """
    names = {id(value): user_name(name) for name, value in root.named_parameters()}
    found = {}
    for number, optimizer in enumerate(optimizers):
        found[f"class of optimizer {number}"] = type(optimizer).__name__
        for group, options in enumerate(optimizer.param_groups):
            inside = sorted(names.get(id(each), "another") for each in options["params"])
            digest = comm.digest_of(dict.fromkeys(inside)) & 0xFFFFFF
            found[f"weights of optimizer {number}, group {group}"] = f"{shown(inside)} (digest {digest:06x})"
    return found


def evaluating(root: nn.Module) -> dict[str, Any]:
    """Return how many modules `eval()` has told not to train, and which, in numbers, for their dropout and statistics differ; and how much is
    dropped."""
    modules = list(root.modules())
    numbers = [number for number, each in enumerate(modules) if not each.training]
    dropped = [(number, each.p) for number, each in enumerate(modules) if isinstance(each, _DropoutNd)]
    return {
        "modules in eval mode (their count, and the sum of their numbers)": (len(numbers), sum(numbers)),
        "p of dropout modules (their sum, and that of each times its number)": (
            sum(p for _, p in dropped),
            sum(number * p for number, p in dropped),
        ),
    }


def _difference(of_ranks: Sequence[dict[str, Any]]) -> str:
    return (
        f"ranks would step by other numbers: {comm.told_differences(of_ranks)}: must be the same on all, or each trains its part of a matrix "
        "by its own; set them on all ranks, from what all know (self.trainer.global_step, a number logged with sync_dist=True), or "
        "broadcast them from rank 0"
    )
