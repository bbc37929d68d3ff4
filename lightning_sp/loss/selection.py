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
    waiting, known = [input.grad_fn], {input.grad_fn}
    ends: dict[type, bool] = {}
    while waiting:
        node = waiting.pop()
        if (is_end := ends.get(type(node))) is None:  # of a graph's thousands of nodes, some fifty names are looked at
            name = node.name()
            if name.rstrip("0123456789") in _CHOOSES:
                return True
            is_end = ATTENTION in name or any(each in name for each in OVER_RANKS)
            if type(node).__name__ in name:  # not that of all which are written in C++ elsewhere
                ends[type(node)] = is_end
        if is_end:
            continue
        for each, _ in node.next_functions:
            if each is not None and each not in known:
                known.add(each)
                waiting.append(each)
    return False


def is_part(target: Tensor) -> bool:
    """Return whether a tensor is a view of a larger one, as `labels[row]` is and `labels[keep]` is not."""
    whole = target._base
    return whole is not None and whole.numel() > target.numel()
