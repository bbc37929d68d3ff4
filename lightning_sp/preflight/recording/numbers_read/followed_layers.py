"""What layers make of a step's tensors, where functions of torch do not show it: FSDP hands a layer others in the place of its inputs.

    hidden -> FSDP's autograd.Function -> layer -> attention of this package -> cross entropy of each token

Each is told what it was given and what it gives. Functions of this package are not: what they give is of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

# Told what was given, and what came of it.
Follow = Callable[[tuple[Any, ...], Any], None]
# Their sums are of all ranks, and no tensor of tokens.
_OF_TOKENS = ("cross_entropy", "nll_loss")


@contextmanager
def followed_layers(follow: Follow) -> Iterator[None]:
    """Tell what modules, autograd.Functions and cross entropies are given and give, while this is entered."""
    function: Any = torch.autograd.Function
    apply = function.__dict__["apply"]

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        output = apply.__func__(cls, *args, **kwargs)
        if not cls.__module__.startswith("lightning_sp."):
            follow((*args, *kwargs.values()), output)
        return output

    def ran(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        follow((*args, *kwargs.values()), output)

    with ExitStack() as undo:
        function.apply = classmethod(applied)
        undo.callback(setattr, function, "apply", apply)
        undo.callback(register_module_forward_hook(ran, with_kwargs=True).remove)
        for name in _OF_TOKENS:
            loss = getattr(F, name)
            setattr(F, name, _told(loss, follow))
            undo.callback(setattr, F, name, loss)
        yield


def _told(loss: Callable[..., Tensor], follow: Follow) -> Callable[..., Tensor]:
    @wraps(loss)
    def told(*args: Any, **kwargs: Any) -> Tensor:
        output = loss(*args, **kwargs)
        follow((*args, *kwargs.values()), output)
        return output

    if (interception := getattr(loss, "__self__", None)) is not None:
        told.__self__ = interception  # type: ignore[attr-defined]  # by which `sharded_cross_entropy` finds the step in progress
    return told


def shares_tokens(output: Tensor, given: Tensor) -> bool:
    """Return whether a tensor has something for each token, or row, of another: (B, s, V) of (B, s, E), (n,) of (n, V). Pure."""
    dims = min(2, output.dim())
    return dims > 0 and given.dim() >= dims and output.shape[:dims] == given.shape[:dims]
