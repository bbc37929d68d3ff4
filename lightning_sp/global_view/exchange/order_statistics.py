"""The k-th smallest of all numbers of a tensor of the sequence, without making it whole: by halving the range that it lies in.

how many of all ranks' numbers are at most m?      one all_reduce of a number for each k, 64 times for float64
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor

_AS_INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def of_all(x: SequenceTensor, ranks: Sequence[int]) -> list[Tensor]:
    """Return numbers by their rank in the order of all, from 0; NaN lies behind all.

    Args:
        x: of floating numbers.
        ranks: from 0 up to the number of numbers, one or several.

    Communicates: as many all_reduces of `len(ranks)` numbers as the dtype has bits.
    """
    own = x.placement
    local = x.local.detach()
    numbers = _ordered(local)
    highest = torch.iinfo(torch.int64).max
    numbers = torch.where(local.isnan(), highest - 1, numbers)
    numbers = own.without_padding(numbers, highest).flatten().sort().values
    bits = torch.iinfo(_AS_INTEGERS[x.dtype]).bits
    wanted = torch.tensor(list(ranks), device=x.device) + 1
    low = torch.full_like(wanted, -(2 ** (bits - 1)))
    high = torch.full_like(wanted, 2 ** (bits - 1) - 1)
    for _ in range(bits):
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without overflow
        count = comm.reduce_sum(torch.searchsorted(numbers, middle, right=True), own.storage.group)
        is_enough = count >= wanted
        high = torch.where(is_enough, middle, high)
        low = torch.where(is_enough, low, middle + 1)
    return list(_floating(high, x.dtype).unbind(0))


def _ordered(x: Tensor) -> Tensor:
    """Return integers in the order of floating numbers."""
    whole = (x + 0.0).view(_AS_INTEGERS[x.dtype])  # -0.0 is 0.0
    most = torch.iinfo(whole.dtype).max
    return torch.where(whole < 0, whole ^ most, whole).to(torch.int64)


def _floating(x: Tensor, dtype: torch.dtype) -> Tensor:
    kind = _AS_INTEGERS[dtype]
    most = torch.iinfo(kind).max
    whole = x.to(kind)
    return torch.where(whole < 0, whole ^ most, whole).view(dtype)
