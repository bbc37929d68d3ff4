"""Whether replicas of the parameters are still the same: with `shard_size` below the world each shard is held by several ranks.

    shard_size 2 of 4 ranks          rank 0: shard 0          rank 1: shard 1
                                     rank 2: shard 0          rank 3: shard 1

All of them make the same update, so a shard stays the same to the bit. A hook that writes what one rank alone knows ends that without a word:
each replica trains a model of its own, and a checkpoint has one of them.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.parameter_names import shown, user_name

# Optimizer steps from one comparison to the next; a checkpoint is compared before it is written.
EVERY_STEPS = 100
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaWatch:
    """Compares replicas every `EVERY_STEPS` optimizer steps; a class because it keeps when it did last."""

    def __init__(self) -> None:
        self._step = 0

    def start_run(self, step: int) -> None:
        """Begin to count at an optimizer step."""
        self._step = step

    def watch(self, root: nn.Module, step: int, shard_size: int, group: ProcessGroup | None) -> None:
        """Compare where it is time to. Every rank must call it at the same step. As `check_replicas`."""
        if step >= self._step + EVERY_STEPS:
            self._step = step
            check_replicas(root, step, shard_size, group)


def check_replicas(root: nn.Module, step: int, shard_size: int, group: ProcessGroup | None) -> None:
    """Refuse to go on where ranks that hold the same shard hold other numbers. Every rank must call it.

    Args:
        root: the sharded module.
        step: optimizer steps so far, for the message.
        shard_size: ranks over which parameters are split.
        group: the world, on a backend for host tensors.

    Communicates: one gather of 8 bytes from each rank; where they differ, one of 16 bytes for each parameter.

    Raises:
        SequenceParallelError: replicas differ; on all ranks.
    """
    if comm.size_of(group or comm.world()) == shard_size:
        return
    sums = _sums(root)
    digests = [int(each) for each in comm.gather(_digest(sums), group)]
    if all(len(set(digests[first::shard_size])) == 1 for first in range(shard_size)):
        return
    every = comm.gather_objects({name: values.tolist() for name, values in sums.items()}, group)
    differing: dict[str, list[list[int]]] = {}
    for first in range(shard_size):
        ranks = range(first, len(every), shard_size)
        for name in sums:
            holders: Mapping[str, list[int]] = defaultdict(list)
            for rank in ranks:
                holders[str(every[rank][name])].append(rank)
            if len(holders) > 1:
                differing.setdefault(name, list(holders.values()))
    name, ranks_of = next(iter(differing.items()))
    raise SequenceParallelError(
        f"after {step} optimizer steps {len(differing)} of {len(sums)} parameters are no longer the same on ranks that hold the same shard "
        f"(shard_size={shard_size} of {len(every)} ranks): {shown(differing)}; of {name} ranks {' and '.join(map(str, ranks_of))} hold other "
        "numbers. Every rank must make the same update: a hook or an optimizer that writes what one rank alone knows (its own batch, its random "
        "numbers, a clock) has to compute it for all, by torch.distributed or lightning_sp.reductions, or to draw it from one seed"
    )


def _sums(root: nn.Module) -> dict[str, Tensor]:
    """Return two sums over the bits of this rank's part of each parameter, on the host."""
    tensors = {user_name(name): value for name, value in root.named_parameters()}
    if not tensors:
        return {}
    on_device = torch.stack([_sums_of_bits(value.detach()) for value in tensors.values()])
    return dict(zip(tensors, on_device.cpu(), strict=True))


def _sums_of_bits(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.is_complex():
        local = torch.view_as_real(local)
    bits = local.contiguous().view(_INTEGERS[local.element_size()])
    # The squares: that one number grows by what another loses leaves the plain sum as it was.
    return torch.stack([bits.sum(dtype=torch.int64), (bits * bits).sum(dtype=torch.int64)])


def _digest(sums: Mapping[str, Tensor]) -> Tensor:
    text = ",".join(f"{name}:{values.tolist()}" for name, values in sums.items())
    return torch.tensor(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big"))
