"""Whether replicas of the parameters are still the same: with `shard_size` below the world each shard is held by several ranks.

    shard_size 2 of 4 ranks          rank 0: shard 0          rank 1: shard 1
                                     rank 2: shard 0          rank 3: shard 1

With tensor parallelism neighbours hold parts of split layers, and the same shard of what is whole on each.

All of them make the same update, so a shard stays the same to the bit. A hook that writes what one rank alone knows ends that without a word:
each replica trains a model of its own, and a checkpoint has one of them.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_sp import comm
from lightning_sp.mesh import tensor_parallel_part
from lightning_sp.parameter_names import shown, user_name

# Optimizer steps from one comparison to the next; a checkpoint is compared before it is written.
EVERY_STEPS = 100
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd, so that no bit is lost in 64 bits.
_MULTIPLIER = 0x5851F42D4C957F2D
# Numbers that are hashed at a time: their 64-bit copies are in memory.
_CHUNK = 1 << 22


class ReplicaWatch:
    """Compares replicas every `EVERY_STEPS` optimizer steps; a class because it keeps when it did last."""

    def __init__(self) -> None:
        self._step = 0
        self._said = False

    def start_run(self, step: int) -> None:
        """Begin to count at an optimizer step."""
        self._step, self._said = step, False

    def watch(self, root: nn.Module, step: int, shard_size: int, group: ProcessGroup | None) -> None:
        """Compare where it is time to. Every rank must call it at the same step. As `compare`."""
        if step >= self._step + EVERY_STEPS:
            self._step = step
            self.compare(root, step, shard_size, group)

    def compare(self, root: nn.Module, step: int, shard_size: int, group: ProcessGroup | None) -> None:
        """Warn once in a run of replicas that have come apart. Every rank must call it. As `difference`."""
        if not self._said and (found := difference(root, step, shard_size, group)):
            self._said = True
            rank_zero_warn(found)


def difference(root: nn.Module, step: int, shard_size: int, group: ProcessGroup | None) -> str | None:
    """Return in words where ranks that hold the same shard hold other numbers, None where they do not. Every rank must call it.

    Args:
        root: the sharded module.
        step: optimizer steps so far, for the message.
        shard_size: ranks over which parameters are split.
        group: the world, on a backend for host tensors.

    Communicates: one gather of 16 bytes from each rank; where they differ, one of 8 bytes for each parameter.
    """
    if comm.size_of(group or comm.world()) == shard_size:
        return None
    hashes, split = _hashes(root), _split_parameters(root)
    tensor = max(split.values(), default=1)
    parts = [{name: each for name, each in hashes.items() if (name in split) == of_split} for of_split in (True, False)]
    digests = [each.tolist() for each in comm.gather(torch.stack([*map(_digest, parts)]), group or comm.world())]

    def holder(rank: int, is_split: bool) -> tuple[int, int]:
        """Return which shard a rank holds, and of which part."""
        return rank // tensor % shard_size, rank % tensor if is_split else 0

    alike: dict[tuple[bool, tuple[int, int]], set[int]] = defaultdict(set)
    for rank, numbers in enumerate(digests):
        for is_split, number in zip((True, False), numbers, strict=True):
            alike[is_split, holder(rank, is_split)].add(number)
    if all(len(each) == 1 for each in alike.values()):
        return None
    every = comm.gather_objects(hashes, group)
    differing: dict[str, list[list[int]]] = {}
    for name in hashes:
        holders: Mapping[Any, Mapping[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, of_rank in enumerate(every):
            holders[holder(rank, name in split)][of_rank[name]].append(rank)
        for found in holders.values():
            if len(found) > 1:
                differing.setdefault(name, list(found.values()))
    name, ranks_of = next(iter(differing.items()))
    return (
        f"after {step} optimizer steps {len(differing)} of {len(hashes)} parameters are no longer the same on ranks that hold the same shard "
        f"(shard_size={shard_size} of {len(every)} ranks): {shown(differing)}; of {name} ranks {' and '.join(map(str, ranks_of))} hold other "
        "numbers. Every rank must make the same update: a hook or an optimizer that writes what one rank alone knows (its own batch, its random "
        "numbers, a clock) has to compute it for all, by torch.distributed or lightning_sp.reductions, or to draw it from one seed"
    )


def _split_parameters(root: nn.Module) -> dict[str, int]:
    """Return the parameters of which tensor-parallel ranks hold parts, each with the number of these."""
    parts = {user_name(name): tensor_parallel_part(value) for name, value in root.named_parameters()}
    return {name: size for name, (size, dim) in parts.items() if dim is not None}


def _hashes(root: nn.Module) -> dict[str, int]:
    """Return a hash of this rank's part of each parameter, on the host."""
    tensors = {user_name(name): value for name, value in root.named_parameters()}
    if not tensors:
        return {}
    on_device = torch.stack([hash_of_bits(value.detach()) for value in tensors.values()])
    return dict(zip(tensors, on_device.tolist(), strict=True))


def hash_of_bits(tensor: Tensor) -> Tensor:
    """Return a hash of a tensor's bits and their places, an int64 on its device: a sum in 64 bits, the same in any order of adding."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.is_complex():
        local = torch.view_as_real(local)
    bits = local.contiguous().view(-1).view(_INTEGERS[local.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, len(bits), _CHUNK):
        mixed = bits[first : first + _CHUNK].long() * _MULTIPLIER
        mixed ^= mixed >> 32
        places = torch.arange(first, first + len(mixed), device=bits.device)
        total += (mixed * (2 * places + 1)).sum()
    return total


def _digest(hashes: Mapping[str, int]) -> Tensor:
    text = ",".join(f"{name}:{value}" for name, value in hashes.items())
    return torch.tensor(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big"))
