"""A digest of a tensor's bits: 64 bits that are the same however it is sharded, padded or replicated.

Each number is hashed with its index in the whole tensor, and the hashes are added up in 64 bits. So ranks hash their own parts, in any order,
and rows that change places, or numbers that change signs in pairs, change the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_sp import comm

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Numbers that are hashed at a time: a few 64-bit copies of them are in memory.
_CHUNK = 1 << 20
_BITS = 64


class Part(NamedTuple):
    """The sum of hashes of some neighbouring numbers of a tensor.

    Args:
        begin: index of the first one in the whole tensor, its rows one after the other.
        end: of the first one behind them.
        total: the sum, in 64 bits.
    """

    begin: int
    end: int
    total: int

    @classmethod
    def of(cls, tensor: Tensor, begin: int) -> Part:
        """Hash a tensor that is this part of another one."""
        bits = _bits(tensor)
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        for first in range(0, len(bits), _CHUNK):
            numbers = bits[first : first + _CHUNK]
            indices = torch.arange(begin + first, begin + first + len(numbers), device=bits.device)
            total += _mixed(numbers.long() ^ _mixed(indices)).sum()
        return cls(begin, begin + len(bits), int(total))


def tensor_digest(tensor: Tensor) -> str:
    """Return the digest of a whole tensor."""
    part = Part.of(tensor, 0)
    return _text(part.total)


def tensor_digests(tensors: Mapping[str, Tensor], group: ProcessGroup | None) -> dict[str, str | None]:
    """Return the digests of tensors that every rank has a part of, or whole. Every rank must call it.

    Args:
        tensors: by name. What a rank does not name has no digest.
        group: the world, on a backend for host objects.

    Communicates: a gather of three numbers for each tensor.

    Returns:
        For every name of any rank the digest, equal on all ranks; None where ranks hold different numbers for the same part.
    """
    own = {name: _own_part(tensor) for name, tensor in tensors.items()}
    ranks = comm.gather_objects(own, group) if dist.is_initialized() else [own]
    found: dict[str, str | None] = {}
    for name in dict.fromkeys(name for each in ranks for name in each):
        held = [each[name] for each in ranks if name in each]
        sizes = {size for size, *_ in held}
        known = len(held) == len(ranks) and len(sizes) == 1
        found[name] = combined([Part(*part) for _, *part in held], sizes.pop()) if known else None
    return found


def combined(parts: Iterable[Part], num_elements: int) -> str | None:
    """Return the digest of a whole tensor from all its parts; None if one is missing, or is another one where it is held twice."""
    totals: dict[tuple[int, int], int] = {}
    for begin, end, total in parts:
        if begin < end and totals.setdefault((begin, end), total) != total:
            return None
    reached = 0
    for begin, end in sorted(totals):
        if begin != reached:
            return None
        reached = end
    return _text(sum(totals.values())) if reached == num_elements else None


def _own_part(tensor: Tensor) -> tuple[int, int, int, int]:
    """Return how many numbers a whole tensor has, and the part of it that this rank holds."""
    if not isinstance(tensor, DTensor):
        part = Part.of(tensor, 0)
        return part.end, *part
    local = tensor.to_local()
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # DCP asks for it
    assert local.shape[1:] == tensor.shape[1:], "FSDP2 splits along dim 0"
    numbers = 2 if tensor.is_complex() else 1
    begin = chunk.offsets[0] * tensor.shape[1:].numel() * numbers if local.numel() and tensor.ndim else 0
    return tensor.numel() * numbers, *Part.of(local, begin)


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers, of a complex one its real ones, as integers of the same bits in one row."""
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])


def _mixed(numbers: Tensor) -> Tensor:
    """Return the finalizer of SplitMix64 of int64 numbers: each bit of the result depends on every bit.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    numbers = (numbers ^ _shifted(numbers, 30)) * _signed(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ _shifted(numbers, 27)) * _signed(0x94D049BB133111EB)
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    # Torch's own shift repeats the sign: a number and its complement would have one hash.
    return (numbers >> bits) & ((1 << (_BITS - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << _BITS) if number >> (_BITS - 1) else number


def _text(total: int) -> str:
    return f"{total % (1 << _BITS):016x}"
