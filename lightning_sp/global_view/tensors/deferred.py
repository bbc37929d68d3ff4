"""A tensor that is made when something reads its numbers: what the rules ask of one, so that they need not read it.

An output head's logits are one (`loss.output_head.deferred_logits`). Each token's numbers are made of its source, a row of hidden states, which
is moved between ranks in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class DeferredTensor(Tensor):
    """A tensor of (..., V) that is made, when it is read, of a source (..., E).

    Attributes:
        blank: a tensor of its shape and strides without data; a view of it has a view of the blank.
    """

    blank: Tensor

    def make(self) -> Tensor:
        """Return the numbers."""
        raise NotImplementedError

    def source_of_tokens(self) -> Tensor | None:
        """Return what each token is made of, (..., E); None where only the numbers themselves will do."""
        raise NotImplementedError

    def of_other_tokens(self, source: Tensor) -> Tensor:
        """Return the same of tokens of another source."""
        raise NotImplementedError


def made(value: Any) -> Any:
    """Return the numbers of what is made when it is read, anything else as it is."""
    return value.make() if isinstance(value, DeferredTensor) else value


def by_source(tensor: Tensor, take: Callable[[Tensor], Tensor]) -> Tensor:
    """Return some tokens of a tensor, or the same in other places; of one that is not made yet, without making it.

    Args:
        tensor: (..., E), or one that is made of that.
        take: gives the tokens, whatever the last dim is.
    """
    if not isinstance(tensor, DeferredTensor):
        return take(tensor)
    source = tensor.source_of_tokens()
    return take(tensor.make()) if source is None else tensor.of_other_tokens(take(source))
