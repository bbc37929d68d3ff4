"""Gradients that this package asks for by itself within a step: of a chunk of logits, of a user's function that is tried."""

from __future__ import annotations

from typing import Any

import torch

# As it was imported: in a step its name stands for what gives a user's call one device's gradients (`step/inner_gradients.py`).
_GRAD = torch.autograd.grad


def gradients_of(*args: Any, **kwargs: Any) -> Any:
    """Call torch's `autograd.grad` on plain tensors.

    Below a mode of torch (`torch.set_default_device`, the preflight's) its body would hand the call to whatever has its name.
    """
    with torch._C.DisableTorchFunction():
        return _GRAD(*args, **kwargs)
