"""Whether a user's `autograd.Function` gives each token what it gives it alone: tried once, beside twice as many tokens.

    forward     f([x, x])[first half]  =  f(x)                  no mean over tokens, no x.shape[1] among its numbers
    backward    g -> f'(x) g           of each token alone, and linear: no norm over tokens, no clamp of a gradient

A rank has its part of the tokens, and gradients of a step are scaled until its backward has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_sp.context.own_gradients import gradients_of
from lightning_sp.global_view.calls.call import Call, mapped
from lightning_sp.global_view.tensors.placement import Placement
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor

# Powers of two: what is linear gives the same bits.
LARGE, SMALL = 2.0**10, 2.0**-10


def are_tokens_alone(cls: Any, original: Callable[..., Any], call: Call, placement: Placement) -> bool:
    """Return whether a function gives each token what it gives it alone, and twice a gradient twice as much, as far as this rank sees.

    Args:
        cls: the function's class.
        original: `torch.autograd.Function.apply`, of a class and its arguments.
        call: with every tensor local.
        placement: of the result.
    """
    try:
        return _tried(cls, original, call, placement)
    except Exception:  # whatever it makes of other tokens than it was given
        return False


def _tried(cls: Any, original: Callable[..., Any], call: Call, placement: Placement) -> bool:
    ndim = max(each.dim() for each in tree_leaves((call.args, call.kwargs)) if isinstance(each, Tensor))

    def run(copies: int, scale: float) -> tuple[list[Tensor], list[Tensor]]:
        """Return outputs, and gradients of what is split, of the first tokens."""
        split: list[Tensor] = []

        def given(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            local = (value.local if isinstance(value, SequenceTensor) else value).detach()
            dim = placement.dim - (ndim - local.dim())
            is_split = dim >= 0 and local.shape[dim] == placement.held
            local = torch.cat([local] * copies, dim) if is_split else local.clone()
            if local.is_floating_point():
                local.requires_grad_()
                if is_split:
                    split.append(local)
            return local * 1 if local.requires_grad else local  # it may be written into

        args = [mapped(each, given) for each in call.args]
        kwargs = {name: mapped(each, given) for name, each in call.kwargs.items()}
        outputs = [each for each in tree_leaves(original(cls, *args, **kwargs)) if isinstance(each, Tensor)]
        learned = [each for each in outputs if each.requires_grad]
        gradients: list[Any] = []
        if split and learned:
            cotangents = [_cotangent(each, placement, copies, scale) for each in learned]
            gradients = list(gradients_of(learned, split, cotangents, allow_unused=True))

        def first(x: Tensor) -> Tensor:
            return x.detach().narrow(placement.dim - (ndim - x.dim()), 0, placement.held)

        found = [
            torch.zeros_like(at) if each is None else each / scale for each, at in zip(gradients, split, strict=False)
        ]
        return [first(each) for each in outputs], [first(each) for each in found]

    with torch.enable_grad():
        small, large, doubled = run(1, SMALL), run(1, LARGE), run(2, SMALL)
    return are_same(small[0], doubled[0]) and are_same(small[1], doubled[1]) and are_same(small[1], large[1])


def _cotangent(output: Tensor, placement: Placement, copies: int, scale: float) -> Tensor:
    """Return what is the same for the first tokens, and larger for the others, if there are."""
    dim = placement.dim
    shape = list(output.shape)
    shape[dim] //= copies
    generator = torch.Generator().manual_seed(0)
    own = (torch.randn(shape, generator=generator) * scale).to(output)
    return torch.cat([own * (1 + 3 * i) for i in range(copies)], dim)


def are_same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    """Return whether numbers are the same but for rounding."""
    return all(
        a.shape == b.shape
        and torch.allclose(a.double(), b.double(), rtol=1e-2 if a.element_size() < 4 else 1e-4, atol=0, equal_nan=True)
        for a, b in zip(found, wanted, strict=True)
    )
