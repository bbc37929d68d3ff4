"""What of a loss is of a data-parallel group's own rows, and what each such term is divided by: read from the graph that the backward follows.

    loss = (a * m).sum() / m.sum() + 0.1 * b[kept].mean() + cross_entropy(...)

    term               coefficient     numbers in it     divided by
    (a * m).sum()      1 / m.sum()     1                 m.sum()
    b[kept].mean()     0.1             kept.sum()        kept.sum() / 0.1
    cross_entropy      of all groups' targets: none of these

Names and numbers of single values alone are read. A number that is no tensor, `.item()` of a count say, stands in the graph too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

# A loss of more is none that a message has room for: of each row by itself, in a loop of Python's say.
MOST_TERMS = 32
# What gives a single number, or each of several, as it is.
_SAME = {
    "AliasBackward0", "CloneBackward0", "ExpandBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2",
    "ToCopyBackward0", "UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0",
}  # fmt: skip
_SUMS = {"SumBackward0", "SumBackward1"}
_MEANS = {"MeanBackward0", "MeanBackward1"}
_OF_SEVERAL = {"CatBackward0", "StackBackward0"}
_MEAN, _SUM = 1, 2  # torch's numbers of reductions


# A node, which of its outputs, its coefficient so far, what that is made of, and the way to it.
_Left = tuple[Any, int, "float | Tensor", tuple["float | Tensor", ...], tuple[str, ...]]


class _UnreadableError(Exception):
    """A number of the graph is packed away, or in compiled code: within a checkpoint it would be computed again."""


@dataclass(frozen=True, kw_only=True)
class OwnTerm:
    """A term of a loss.

    Args:
        node: of the graph, and which of its outputs.
        coefficient: of it in the loss.
        numbers: over which it is a mean itself; 1 of a sum, the group's rows where that is not known.
        divisors: that its coefficient is made of.
        path: names of the nodes between the loss and it, of those that make something else of it.
    """

    node: tuple[Any, int]
    coefficient: float | Tensor
    numbers: int
    divisors: tuple[float | Tensor, ...] = ()
    path: tuple[str, ...] = ()

    def count(self, like: Tensor) -> Tensor:
        """Return what it counts by: numbers / coefficient, 0 where it counts for nothing. Shapes: -> (), float64."""
        found = self.numbers / self.factor(like)
        return torch.where(torch.isfinite(found), found, torch.zeros_like(found))

    def is_divided_by_one(self, like: Tensor) -> Tensor:
        """Return whether a divisor is 1, the least that a count of targets may be clamped to. Shapes: -> (), bool."""
        ones = [torch.as_tensor(each, device=like.device).reshape(()) == 1 for each in self.divisors]
        return torch.stack(ones).any() if ones else torch.zeros((), dtype=torch.bool, device=like.device)

    @property
    def is_of_all_groups(self) -> bool:
        """Whether it is a cross entropy of torch's, in a whole run: of groups that is a mean over all targets."""
        return str(self.node[0].name()).startswith("NllLoss")

    def factor(self, like: Tensor) -> Tensor:
        """Return its coefficient. Shapes: -> (), float64."""
        return torch.as_tensor(self.coefficient, dtype=torch.float64, device=like.device).detach().reshape(())


def own_terms(
    loss: Tensor, rows: int, sequence_group: ProcessGroup, *, is_normalized: bool = False
) -> list[OwnTerm] | None:
    """Return the terms of a loss that are no sums over all data-parallel groups; None where they cannot be read, or are too many.

    Args:
        loss: one number.
        rows: of the group.
        sequence_group: the ranks that share a sequence, over which a term is summed.
        is_normalized: the last division is Lightning's, by accumulate_grad_batches.
    """
    if loss.grad_fn is None:
        return []
    found: list[OwnTerm] = []
    left: list[_Left] = [(loss.grad_fn, loss.output_nr, 1.0, (), ())]
    try:
        while left:
            node, output, coefficient, divisors, path = left.pop()
            is_last = is_normalized and node is loss.grad_fn
            if hasattr(node, "variable"):  # a weight, the same in all groups
                continue
            if hasattr(node, "group"):
                if node.group is sequence_group:
                    found.append(
                        OwnTerm(node=(node, output), coefficient=coefficient, numbers=1, divisors=divisors, path=path)
                    )
            elif (parts := _parts(node)) is not None:
                for part, index, factor in parts:
                    others = (1.0 / factor,) if isinstance(factor, Tensor) and not is_last else ()
                    names = () if is_last or node.name() in _SAME else (node.name(),)
                    left.append((part, index, coefficient * factor, (*divisors, *others), (*path, *names)))
            else:
                numbers = rows if (known := _numbers(node)) is None else known
                found.append(
                    OwnTerm(node=(node, output), coefficient=coefficient, numbers=numbers, divisors=divisors, path=path)
                )
            if len(found) + len(left) > MOST_TERMS:
                return None
    except _UnreadableError:
        return None
    return found


def is_empty(term: OwnTerm, like: Tensor) -> Tensor:
    """Return whether a sum is over nothing that counts, as a mask before it says; False where none does. Shapes: -> (), bool."""
    node = term.node[0]
    while node is not None and (hasattr(node, "group") or node.name() in _SUMS | _SAME):
        node = node.next_functions[0][0]
    try:
        found = False if node is None else _hides_all(node)
    except _UnreadableError:
        found = False
    return torch.as_tensor(found, device=like.device).reshape(())


def _hides_all(node: Any) -> Tensor | bool:
    name, inputs = node.name(), node.next_functions
    if name == "MulBackward0" and None in (inputs[0][0], inputs[1][0]):
        mask: Tensor = _saved(node, "other" if inputs[0][0] is not None else "self")
        return ~mask.any()
    if name == "MaskedFillBackward0":
        found: Tensor = _saved(node, "mask").all()
        return found
    if name == "WhereBackward0" and None in (inputs[0][0], inputs[1][0]):
        condition: Tensor = _saved(node, "condition")
        return ~condition.any() if inputs[0][0] is not None else condition.all()
    if name in ("NllLossBackward0", "NllLoss2DBackward0"):
        ignored: Tensor = (_saved(node, "target") == node._saved_ignore_index).all()
        return ignored
    return False


def _parts(node: Any) -> list[tuple[Any, int, float | Tensor]] | None:
    """Return of what numbers a node makes one, and their factors; None where it makes it of more than single numbers."""
    name, inputs = node.name(), node.next_functions
    if name.startswith("CompiledFunction"):
        raise _UnreadableError
    if name in _SAME:
        return [(*inputs[0], 1.0)]
    if name == "NegBackward0":
        return [(*inputs[0], -1.0)]
    if name in ("AddBackward0", "SubBackward0"):
        second = node._saved_alpha if name == "AddBackward0" else -node._saved_alpha
        return [(*each, factor) for each, factor in zip(inputs, (1.0, second), strict=True) if each[0] is not None]
    if name == "RsubBackward1":
        return [(*inputs[0], -node._saved_alpha)]
    if name == "DivBackward0" and inputs[1][0] is None:
        return [(*inputs[0], 1.0 / _number(node, "other"))]
    if name == "MulBackward0" and None in (inputs[0][0], inputs[1][0]):
        first = inputs[0][0] is not None
        return [(*inputs[0 if first else 1], _number(node, "other" if first else "self"))]
    if name in _SUMS | _MEANS:
        return list(_of_several(node, name)) or None
    return None


def _of_several(node: Any, name: str) -> Iterator[tuple[Any, int, float]]:
    """Yield single numbers that were put together and summed."""
    [(before, _)] = node.next_functions
    if before is None or before.name() not in _OF_SEVERAL:
        return
    parts, size = before.next_functions, node._saved_self_sym_sizes
    if tuple(size) == (len(parts),):
        yield from ((*each, 1.0 if name in _SUMS else 1.0 / len(parts)) for each in parts if each[0] is not None)


def _numbers(node: Any) -> int | None:
    """Return over how many numbers a node makes a mean; 1 of a sum, None where it makes something else."""
    name = node.name()
    if name in _SUMS:
        return 1
    if name in _MEANS:
        return int(torch.Size(node._saved_self_sym_sizes).numel())
    reduction = getattr(node, "_saved_reduction", None)
    if reduction == _SUM:
        return 1
    return int(_saved(node, "self").numel()) if reduction == _MEAN and hasattr(node, "_raw_saved_self") else None


def _saved(node: Any, name: str) -> Any:
    """Return a tensor or a number that a node has kept.

    Raises:
        _UnreadableError: hooks have packed it into something else than a tensor.
    """
    raw: Any = getattr(node, f"_raw_saved_{name}", None)
    if getattr(raw, "unpack_hook", None) is None:
        return getattr(node, f"_saved_{name}")
    if isinstance(raw.data, Tensor):
        return raw.data
    raise _UnreadableError


def _number(node: Any, name: str) -> Any:
    """Return a number that a node has kept, in float64: a count is whole, or in the loss's own dtype. As `_saved`."""
    found = _saved(node, name)
    if not isinstance(found, Tensor):
        return found
    # Of a number of Python's torch keeps a tensor that follows the default dtype as that does: 1 / 52.5 would be rounded to float32.
    return found.detach() + torch.zeros((), dtype=torch.float64, device=found.device)
