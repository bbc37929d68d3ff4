"""Room in a whole batch for tokens that a model puts before its sequence, made before labels are shifted and the sequence is split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_sp.data.batch.contents.entries import STANDARD_NAMES
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.errors import SequenceParallelError

_POSITIONS = ("position_ids", "input_pos")


def make_room(entries: Mapping[str, Any], dims: Mapping[str, int], options: ShardOptions) -> dict[str, Any]:
    """Return a batch's entries with `options.virtual_tokens` more before each sequence: no id, no label, visible.

    Positions are left out: the model counts from its own first token on.

    Args:
        entries: of a whole batch.
        dims: of those that carry the sequence.
        options: of the batches.

    Shapes: (B, S, ...) -> (B, virtual_tokens + S, ...).

    Raises:
        SequenceParallelError: what such a token is in an entry is not known, or rows hold several documents.
    """
    num_tokens = options.virtual_tokens
    if options.packed_documents:
        raise SequenceParallelError(
            f"packed_documents=True, and the model puts {num_tokens} virtual tokens before each sequence: PEFT drops position_ids, so that a "
            "token attends to the documents before its own; give each row one document, or say packed_documents=False if it is to see them"
        )
    dims = {name: dim for name, dim in dims.items() if name not in _POSITIONS}
    unknown = [name for name in dims if name not in STANDARD_NAMES]
    if unknown:
        raise SequenceParallelError(
            f"the model puts {num_tokens} virtual tokens before each sequence, and what {unknown} of the batch hold for these is not known: use "
            f"standard names ({', '.join(STANDARD_NAMES)}), or make it of these in the step"
        )
    longer = {
        name: torch.cat([_tokens(entries[name], dim, num_tokens, STANDARD_NAMES[name][1]), entries[name]], dim)
        for name, dim in dims.items()
    }
    return {**{name: value for name, value in entries.items() if name not in _POSITIONS}, **longer}


def _tokens(tensor: Tensor, dim: int, num_tokens: int, value: float | int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = num_tokens
    return tensor.new_full(shape, value)
