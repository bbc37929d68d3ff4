"""Whether a module takes each token by itself: tried on some tokens whole, and on their halves by themselves.

    some tokens       as they come
    a crowd           where a module chooses: all tokens choose alike, so that experts which take so many, or compare tokens, drop some

It leaves no trace: not in the module, in random generators, or in what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lightning_sp.parallelize.recomputation.state_of_blocks import leaves_alone

# Tokens of a row that are tried.
_SOME = 32
# Of the largest output: what a product of other shapes may round otherwise.
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What a trial has shown.

    Args:
        why_whole: why the module must run whole, in a message; empty where each token is by itself.
        tokens: of a row up to which that holds; None for any.
    """

    why_whole: str = ""
    tokens: int | None = None


def try_tokens(module: nn.Module, forward: Callable[..., Any], given: Sequence[Tensor], crowd: int) -> Tried:
    """Try whether a module takes each token by itself.

    Args:
        module: it.
        forward: its own.
        given: of a call: (..., tokens, any) each.
        crowd: tokens of a row that choose alike.
    """
    # A checkpoint around it counts operators, and would miss these when it runs again.
    on_device = [given[0].device] if given[0].is_cuda else []
    with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(on_device):
        few = [each[..., :_SOME, :].clone() for each in given]
        chooses = _Choices()  # type: ignore[no-untyped-call]
        with chooses:
            is_left = leaves_alone(module, partial(forward, *few))
        if not is_left:
            return Tried(why_whole="writes in its forward to what it keeps, which each tile would do")
        if any(each._version for each in few):
            return Tried(why_whole="writes in its forward to what it is given")
        alone = "does not take each token by itself, or returns more than its tokens"
        if not _halves_are_the_whole(forward, few):
            return Tried(why_whole=alone)
        tokens = given[0].shape[-2]
        if not chooses.are_made and len(given) == 1:
            return Tried(tokens=None if tokens >= _SOME else tokens)
        if not _halves_are_the_whole(forward, _choosing_alike(given, min(tokens, crowd))):
            return Tried(why_whole=alone)
        return Tried(tokens=None if tokens >= max(crowd, _SOME) else tokens)


def _choosing_alike(given: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """Return tokens that choose alike: the first one again and again, or where choices are given those of the first one."""
    has_choices = any(not each.is_floating_point() for each in given)
    return [
        each[..., :tokens, :]
        if has_choices and each.is_floating_point()
        else each[..., :1, :].repeat_interleave(tokens, -2)
        for each in given
    ]


def _halves_are_the_whole(forward: Callable[..., Any], given: Sequence[Tensor]) -> bool:
    half = given[0].shape[-2] // 2
    whole = forward(*given)
    if not isinstance(whole, Tensor) or whole.shape != given[0].shape:
        return False
    parts = [forward(*(each[..., :half, :] for each in given)), forward(*(each[..., half:, :] for each in given))]
    error = (torch.cat(parts, -2) - whole).abs().max()
    return bool(error <= _ROUNDING.get(whole.dtype, 0.0) * whole.abs().max())


class _Choices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether something chooses: makes numbers of an index, truth values, or a plain number of a tensor.

    Attributes:
        are_made: whether it does.
    """

    are_made = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        results = made if isinstance(made, (tuple, list)) else (made,)
        is_numbers = [isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex()) for each in results]
        self.are_made |= not all(is_numbers)
        return made
