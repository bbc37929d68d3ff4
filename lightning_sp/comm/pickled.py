"""Values as bytes for other ranks, tensors of whole numbers without a sign among them: torch writes those, and cannot read them again.

torch names a tensor's storage by its dtype, and has no such name for uint16 (2.13): `pickle.loads` of its own `pickle.dumps` is an
AttributeError. Token files are often of such numbers.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

# As what they are sent.
_INSTEAD = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def pickled(value: Any) -> bytes:
    """Return a value's pickled form, which `pickle.loads` reads."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Return how a tensor of such a dtype is made again; anything else as it is."""
        if type(value) is Tensor and value.dtype in _INSTEAD:
            return _of_dtype, (value.detach().contiguous().view(_INSTEAD[value.dtype]), value.dtype)
        return NotImplemented


def _of_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.view(dtype)
