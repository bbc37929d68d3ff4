"""How far a step on shards is from the same step whole: the loss, every gradient and every buffer that it writes, tensor by tensor.

    ||g_sharded - g_whole||     against ||g_whole||
    ||b_sharded - b_whole||     against max(||b_whole - b before||, FLOOR ||b_whole||)

Gradients are compared where FSDP left them, shard by shard; only the norms are summed over the ranks, in one small collective, so that
all ranks decide alike.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_sp import comm
from lightning_sp.parameter_names import user_name

# Below this part of all gradients together, or of a buffer, what is left is rounding: the gradient of an attention keys' bias, say.
FLOOR = 1e-2


class Difference(NamedTuple):
    """Norms over all ranks: of what differs, and of what that is measured by."""

    error: float
    scale: float


def averaged(loss: Tensor) -> Tensor:
    """Return the loss over the ranks as FSDP averages its gradients: data-parallel groups may each have one of their own rows."""
    return comm.reduce_sum(loss) / comm.size_of(comm.world())


def gradient_differences(
    reference: Tensor, loss: Tensor, whole: dict[str, Tensor | None], sharded: dict[str, Tensor | None]
) -> dict[str, Difference]:
    """Return ||sharded - whole|| and ||whole|| of the loss (under the empty name) and of each gradient, over all ranks."""
    pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {"": (reference.detach(), loss.detach())}
    pairs |= {name: (whole[name], sharded[name]) for name in whole}
    squares = []
    for a, b in pairs.values():
        if a is None and b is None:
            squares.append(torch.zeros(2, dtype=torch.float64, device=reference.device))
            continue
        zero = torch.zeros_like(a if a is not None else b)  # type: ignore[arg-type]
        a, b = (zero if a is None else a), (zero if b is None else b)
        squares.append(torch.stack([_square(b - a), _square(a)]).to(reference.device))  # some may be the host's
    norms = comm.reduce_sum(torch.stack(squares)).sqrt().tolist()
    return {name: Difference(*pair) for name, pair in zip(pairs, norms, strict=True)}


def buffer_differences(
    module: nn.Module, whole: dict[str, Tensor], sharded: dict[str, Tensor], device: torch.device
) -> dict[str, Difference]:
    """Return ||sharded - whole|| and what it is measured by of each buffer, over all ranks; the module's own are as before the step."""
    before = {name: buffer for name, buffer in module.named_buffers() if not isinstance(buffer, DTensor)}
    if not before:
        return {}
    squares = torch.zeros(len(before), 2, dtype=torch.float64, device=device)
    for row, (name, old) in zip(squares, before.items(), strict=True):
        a, b = whole.get(name, old), sharded.get(name, old)
        if a.shape != b.shape:
            row[0] = math.inf
        elif not torch.equal(a, b):
            row[0] = _square(_minus(b, a))
            moved = _square(_minus(a, old)) if a.shape == old.shape else 0.0
            row[1] = max(moved, FLOOR**2 * _square(_real(a).nan_to_num(0.0, 0.0, 0.0)))
    norms = comm.reduce_sum(squares).sqrt().tolist()
    return {plain_name(name): Difference(*pair) for name, pair in zip(before, norms, strict=True)}


def moved_buffers(module: nn.Module, after: dict[str, Tensor], device: torch.device) -> frozenset[str]:
    """Return the names of the buffers that a step has moved on any rank; the module's own are as before the step."""
    before = {name: buffer for name, buffer in module.named_buffers() if not isinstance(buffer, DTensor)}
    if not before:
        return frozenset()
    moved = [not torch.equal(old, after.get(name, old)) for name, old in before.items()]
    of_any = comm.reduce_sum(torch.tensor(moved, dtype=torch.float64, device=device)).tolist()
    return frozenset(name for name, number in zip(before, of_any, strict=True) if number)


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every buffer that is whole on each rank."""
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers() if not isinstance(buffer, DTensor)}


def has_16_bit_weights(module: nn.Module) -> bool:
    """Return whether rounding in 16 bits cannot be switched off."""
    return any(p.is_floating_point() and torch.finfo(p.dtype).bits == 16 for p in module.parameters())


def plain_name(name: str) -> str:
    """Return a parameter's name as the user knows it, without the wrappers'."""
    return user_name(name)


def _square(tensor: Tensor) -> Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype).double()
    return norm * norm


def _minus(a: Tensor, b: Tensor) -> Tensor:
    """Return a - b of any dtype, 0 where they are equal: infinite or nan, both."""
    a, b = _real(a), _real(b)
    return (a - b).masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)


def _real(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
