"""Fourier transforms: along other dims local, along the sequence of whole lines, one dim after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_sp.global_view.calls.call import NO_RULE, Call, Rule, is_sequence, named, placed
from lightning_sp.global_view.exchange.lines import along

_OF_ONE_DIM: dict[str, Callable[..., Any]] = {
    each.__name__.removeprefix("fft_"): each
    for each in (torch.fft.fft, torch.fft.ifft, torch.fft.rfft, torch.fft.irfft, torch.fft.hfft, torch.fft.ihfft)
}


def of_one_dim(call: Call) -> Any:
    """Transform along one dim."""
    if not is_sequence(call.args[0]) or "out" in call.kwargs:
        return NO_RULE
    n, dim, norm = call.argument(1, "n"), call.argument(2, "dim", -1), call.argument(3, "norm")
    return _transformed(call.name.removeprefix("fft_"), call.args[0], n, dim, norm)


def of_several_dims(call: Call) -> Any:
    """Transform along several dims, one after the other: of real numbers the last dim first, to real numbers last."""
    x = call.args[0]
    if not is_sequence(x) or "out" in call.kwargs:
        return NO_RULE
    name = call.name.removeprefix("fft_")
    sizes, norm = call.argument(1, "s"), call.argument(3, "norm")
    dims = call.argument(2, "dim", (-2, -1) if name.endswith("2") else None)
    if dims is None:
        dims = tuple(range(-len(sizes), 0)) if sizes is not None else tuple(range(x.dim()))
    dims = [dims] if isinstance(dims, int) else list(dims)
    given: Sequence[Any] = [None] * len(dims) if sizes is None else [None if size == -1 else size for size in sizes]
    kind = name.removesuffix("2").removesuffix("n")
    inverse = kind.startswith("i")
    steps = [(("ifft" if inverse else "fft"), n, dim) for n, dim in zip(given, dims, strict=True)]
    if kind in ("rfft", "irfft"):
        last = (kind, given[-1], dims[-1])
        steps = [last, *steps[:-1]] if kind == "rfft" else [*steps[:-1], last]
    for step, n, dim in steps:
        x = _transformed(step, x, n, dim, norm)
    return x


def _transformed(name: str, x: Any, n: int | None, dim: int, norm: str | None) -> Any:
    function, own = _OF_ONE_DIM[name], x.placement
    if dim % x.dim() != own.dim:
        return placed(function(x.local, n, dim, norm), own)
    found = along(x, lambda part: function(part, n, -1, norm))
    return NO_RULE if found is None else found


RULES: dict[str, Rule] = {
    **named("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft", of_one_dim),
    **named("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn", of_several_dims),
}
