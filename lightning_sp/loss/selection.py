"""Targets that a step chose by their values, `cross_entropy(logits[keep], labels[keep])`: how many a rank has says nothing of what they are.

One rank may keep as many as a row has tokens, or as the batch has rows, where another keeps others. Taken at its word it would wait in another
collective than they do.
"""

from __future__ import annotations

from torch import Tensor

# What the graph of a tensor names: the attention of a shard, and sums over ranks.
ATTENTION, OVER_RANKS = "lightning_sp_attention", ("_SumOverRanks", "_GatherOverRanks")
# torch's x[keep], x[rows, places], x.index_select, x.masked_select, x.gather, x.take.
_CHOOSES = tuple(f"{name}Backward" for name in ("Index", "IndexSelect", "MaskedSelect", "Gather", "Take"))


def may_be_chosen(input: Tensor) -> bool:
    """Return whether entries of a tensor may have been chosen by values since the last attention: by its graph, so alike on all ranks."""
    if input.grad_fn is None:
        return True
    waiting, known = [input.grad_fn], set()
    while waiting:
        node = waiting.pop()
        name = node.name()
        if node in known or ATTENTION in name or any(each in name for each in OVER_RANKS):
            continue
        known.add(node)
        if name.rstrip("0123456789") in _CHOOSES:
            return True
        waiting += [each for each, _ in node.next_functions if each is not None]
    return False


def is_part(target: Tensor) -> bool:
    """Return whether a tensor is a view of a larger one, as `labels[row]` is and `labels[keep]` is not."""
    whole = target._base
    return whole is not None and whole.numel() > target.numel()
