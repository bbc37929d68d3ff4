"""Tensors of the sequence that a function of positions reads, which torch.vmap calls with all of them: a mask of S x S, say.

    mask = lambda b, i, j: (i >= j) & (documents[b, i] == documents[b, j])

Positions are the whole's on every rank, and so is what is read by them: documents, a mask, ids.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.calls.call import Call, is_sequence, whole_is_small
from lightning_sp.users_line import users_line


def read_at_all_positions(call: Call) -> Tensor | None:
    """Return what positions of torch.vmap's read of a tensor of the sequence; None of any other call."""
    if call.name != "getitem" or not is_sequence(call.args[0]):
        return None
    indices = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    tensors = [each for each in indices if isinstance(each, Tensor)]
    are_mapped = [not is_sequence(each) and torch._C._functorch.is_batchedtensor(each) for each in tensors]
    if not tensors or not all(are_mapped) or any(not isinstance(each, (Tensor, int)) for each in indices):
        return None
    found: Tensor = of_all_positions(call.args[0], indices)[call.args[1]]
    return found


def of_all_positions(x: Any, indices: Any) -> Tensor:
    """Return a tensor of the sequence whole, for a function of positions that torch.vmap calls with all of them: its result is whole, too.

    Raises:
        SequenceParallelError: it has many numbers for each token, or is learned; or positions are of a part.
    """
    if not is_sequence(x) or any(map(is_sequence, indices)) or x.requires_grad or not whole_is_small(x):
        raise SequenceParallelError(
            f"global_view: a function of positions that torch.vmap calls with all of them reads {tuple(x.shape)} ({users_line()}), and a rank "
            "has its part of the sequence: that is carried where it reads few numbers of each token, a mask or documents, without a gradient; "
            "hand it lightning_sp.reductions.unshard(x), the whole on every rank"
        )
    x.placement.storage.note_reduction()
    # Ranks send each other numbers of their own, none of those that are mapped.
    with temporarily_clear_interpreter_stack():
        whole: Tensor = x.whole()
    return whole
