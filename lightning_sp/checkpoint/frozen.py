"""Checkpoints without frozen parameters: the base of a LoRA, which building the model gives again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parameter_names import shown, user_name

# The entry of a checkpoint that names what was left out of it.
EXCLUDED = "lightning_sp_excluded_parameters"


def frozen_names(module: nn.Module, optimizers: Sequence[Optimizer], trained: Collection[str] = ()) -> set[str]:
    """Return the names of the parameters that need no gradient.

    Args:
        module: the model.
        optimizers: of this run; one that has a state of a parameter has trained it.
        trained: names that needed a gradient when this run began.

    Raises:
        SequenceParallelError: an optimizer has trained one of them before it was frozen.
    """
    frozen = {user_name(n): p for n, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    lost = [
        n for n, each in frozen.items() if n in trained or any(optimizer.state.get(each) for optimizer in optimizers)
    ]
    if lost:
        raise SequenceParallelError(
            f"exclude_frozen_parameters=True: {len(lost)} of {len(frozen)} frozen parameters were trained in this run and frozen later "
            f"({shown(lost)}): a checkpoint without them would lose that; exclude_frozen_parameters=False keeps them"
        )
    return set(frozen)


def excluded_names(checkpoint: Mapping[str, Any]) -> set[str]:
    """Return the names of what was left out of a checkpoint."""
    return set(checkpoint.get(EXCLUDED) or ())
