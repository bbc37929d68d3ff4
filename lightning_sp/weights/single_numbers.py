"""Shards of parameters that are a single number, of shape (): FSDP2 has them as shape (1,), and whoever reads a whole one wants ()."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

# The entry of a checkpoint folder with the names of those that its tensors of shape (1,) stand for.
SINGLE_NUMBERS = "lightning_sp_single_numbers"
# The attribute of a module with the names of its own, and that of a shard. `module.to` may leave another object in a shard's place.
_NAMES, _MARK = "_lightning_sp_single_numbers", "_is_single_number"


def note_single_number(module: nn.Module, name: str) -> None:
    """Note of a module that a parameter of its own is one."""
    vars(module).setdefault(_NAMES, set()).add(name)


def mark_single_numbers(root: nn.Module) -> None:
    """Mark the shards of those that a module holds by now."""
    for module in root.modules():
        for name in vars(module).get(_NAMES, ()):
            if (shard := module._parameters.get(name)) is not None:
                mark_single_number(shard)


def mark_single_number(shard: Tensor) -> None:
    """Note of a sharded tensor of shape (1,) that it is a single number, of shape ()."""
    setattr(shard, _MARK, True)


def is_single_number(value: Any) -> bool:
    """Return whether a tensor is the shard of one."""
    return getattr(value, _MARK, False) is True


def in_own_shape(whole: Tensor, shard: Any) -> Tensor:
    """Return a whole tensor in the shape that it has on one device.

    Args:
        whole: of shape (1,) where it is a single number.
        shard: of which it was made.
    """
    return whole.reshape(()) if is_single_number(shard) and whole.shape == (1,) else whole
