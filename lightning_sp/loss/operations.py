"""Which operations losses are made of. One that no step before had may be one that looks along the sequence, and was compared with nothing.

    loss <- NllLoss <- LogSoftmax <- Addmm <- ...       pairs: (NllLoss, LogSoftmax), (LogSoftmax, Addmm), ...

Names alone are read, from the graph that the backward follows: no number, no tensor.
"""

from __future__ import annotations

from torch import Tensor


class SeenOperations:
    """Pairs of operations, of which one's result goes into the other, of the steps so far; a class because each step may add to them.

    What has no part in a gradient is not among them, nor what is in compiled code or in a checkpoint with `use_reentrant=True`.
    """

    def __init__(self) -> None:
        self._pairs: set[tuple[str, str]] = set()
        self._waiting: dict[tuple[str, str], int] = {}  # how many losses had those that no trial has shown

    def add(self, loss: Tensor, *, is_tried: bool = True) -> bool:
        """Add those of a loss; return whether a trial is to show one. It takes half a us for each node of the graph.

        Args:
            loss: of a step.
            is_tried: whether the step is compared with one device; of one that is not, what is new stays so. It is told the first time, the
                second, the fourth, and so on: a trial of another batch may not show it.
        """
        found = pairs_of(loss)
        if is_tried:
            self._pairs |= found
            self._waiting = {each: times for each, times in self._waiting.items() if each not in found}
            return False
        new = found - self._pairs
        self._waiting |= {each: self._waiting.get(each, 0) + 1 for each in new}
        return any(self._waiting[each] & (self._waiting[each] - 1) == 0 for each in new)

    @property
    def are_shown(self) -> bool:
        """Whether trials have shown all."""
        return not self._waiting


def pairs_of(loss: Tensor) -> set[tuple[str, str]]:
    """Return the pairs of operations of a loss, by their names in autograd."""
    if loss.grad_fn is None:
        return set()
    found, names, left = set(), {loss.grad_fn: loss.grad_fn.name()}, [loss.grad_fn]
    while left:
        node = left.pop()
        name = names[node]
        for other, _ in node.next_functions:
            if other is None:
                continue
            if (of_other := names.get(other)) is None:
                of_other = names[other] = other.name()
                left.append(other)
            found.add((name, of_other))
    return found
