"""A model whose own casts to float32 give float64, so that a difference in its last digits is told from a fault.

Norms, rotary angles and losses of many models cast to float32. A training in float64 then differs by float32's rounding: between layouts,
and on one device between two orders of a batch's rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Float32AsFloat64(TorchFunctionMode):
    """Within it, what asks for float32 gets float64; a class because torch's mode is one."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function with float64 where it names float32."""
        named = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return (Tensor.double if func is Tensor.float else func)(*map(_wide, args), **named)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
