"""Tensors of the sequence on their way into a unit of FSDP2: its hook puts what needs a gradient through a function of autograd.

Such a function takes tensors with memory. So what a module is called with is this rank's part while FSDP2's hook runs, and shows the whole
again before the module and the hooks of its user see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_sp.global_view.tensors.placement import Placement
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor

_MARK = "_lightning_sp_boundary"


def local_parts(leaves: list[Any]) -> tuple[list[Any], dict[int, Placement]]:
    """Return values with this rank's part of each tensor of the sequence, and where these are."""
    placements = {i: each.placement for i, each in enumerate(leaves) if isinstance(each, SequenceTensor)}
    return [each.local if i in placements else each for i, each in enumerate(leaves)], placements


def shown_again(leaves: Sequence[Any], placements: Mapping[int, Placement]) -> list[Any]:
    """Return values whose parts show the whole, as before `local_parts`."""
    return [SequenceTensor(each, placements[i]) if i in placements else each for i, each in enumerate(leaves)]


class _Boundary:
    """The two hooks of a module; a class because one leaves what the other needs."""

    def __init__(self) -> None:
        self.placements: dict[int, Placement] = {}

    def hide(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        parts, self.placements = local_parts(leaves)
        return tree_unflatten(parts, structure) if self.placements else None

    def show(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.placements:
            return None
        leaves, structure = tree_flatten((args, kwargs))
        placements, self.placements = self.placements, {}
        return tree_unflatten(shown_again(leaves, placements), structure)


def hide_from_fsdp(root: nn.Module) -> None:
    """Let FSDP2's hooks, and those that stand for them where a part of a unit is called, see this rank's part of the arguments.

    Args:
        root: the sharded module; nothing where it was prepared before.
    """
    for module in root.modules():
        hooks = module._forward_pre_hooks
        of_user = [
            key
            for key, hook in hooks.items()
            if not hook.__module__.startswith(("torch.distributed.", "lightning_sp."))
        ]
        if len(of_user) == len(hooks) or hasattr(module, _MARK):
            continue
        boundary = _Boundary()
        module.register_forward_pre_hook(boundary.hide, prepend=True, with_kwargs=True)
        module.register_forward_pre_hook(boundary.show, with_kwargs=True)
        for key in of_user:
            hooks.move_to_end(key)  # type: ignore[attr-defined]
        setattr(module, _MARK, boundary)
