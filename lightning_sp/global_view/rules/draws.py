"""Random numbers in the shape of the sequence: each rank draws those of its own tokens, or all ranks draw them whole.

Whole are those of a trial, which is compared with one device's, and those of a generator of the user's: it is alike on all ranks, so
each would draw the same numbers for its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Generator

from lightning_sp.global_view.calls.call import NO_RULE, Call, Rule, is_sequence, placed
from lightning_sp.global_view.tensors.placement import Placement, part_of


def drawn(call: Call, placement: Placement, on_own: Callable[[], Any]) -> Any:
    """Return this rank's part of what a function draws.

    Args:
        call: the function, of tensors that show the whole.
        placement: where the sequence of its result is.
        on_own: draws for this rank's own tokens.
    """
    storage = placement.storage
    if storage.draws_whole or any(isinstance(each, Generator) for each in call.kwargs.values()):
        return part_of(call.on_wholes(), placement)
    # Of the whole tensors that a step draws every rank needs the same numbers; of tokens that each has for itself, its own.
    with storage.own_draws():
        return on_own()


def multinomial(call: Call) -> Any:
    """Draw classes of each token, by its own probabilities."""
    weights = call.argument(0, "input")
    if not is_sequence(weights) or weights.placement.dim == weights.dim() - 1 or call.kwargs.get("out") is not None:
        return NO_RULE
    own = weights.placement

    def of_tokens() -> Any:
        # Padding may have no class to draw, and would end this rank alone.
        return call.changed(lambda each: own.without_padding(each.local, 1.0) if is_sequence(each) else each)

    return placed(drawn(call, own, of_tokens), own)


RULES: dict[str, Rule] = {"multinomial": multinomial}
