"""Positions of images and videos in three rows (time, height, width; M-RoPE, arXiv:2409.12191), which a model counts from its ids.

They depend on every token before: the model counts on the whole sequence, and each rank takes those of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_sp.context.step import SequenceContext
from lightning_sp.layout import shard
from lightning_sp.rewrite.hugging_face.generation import delete_attribute
from lightning_sp.rewrite.hugging_face.whole_sequence import call_on_whole_sequence

_METHOD = "get_rope_index"


def count_on_whole_sequence(model: Any, context: SequenceContext, undo: ExitStack) -> None:
    """Let every part of a model that counts positions in three rows do so on the whole sequence; `undo` takes that back."""
    for each in model.modules():
        if hasattr(each, _METHOD):
            setattr(each, _METHOD, partial(_rope_index, context, getattr(each, _METHOD)))
            undo.callback(delete_attribute, each, _METHOD)


def counts_in_rows(module: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a model will count its positions in three rows: it knows the sizes of images, and which tokens are theirs."""
    sizes = any(kwargs.get(name) is not None for name in ("image_grid_thw", "video_grid_thw"))
    known = sizes and kwargs.get("mm_token_type_ids") is not None and kwargs.get("input_ids") is not None
    return known and any(hasattr(each, _METHOD) for each in module.modules())


def _rope_index(context: SequenceContext, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    step = context.step
    if step is None or context.mesh.layout.size == 1:
        return original(*args, **kwargs)
    sequence = step.batch
    positions, *others = call_on_whole_sequence(context, original, *args, **kwargs)
    # Our padding stands behind the sequence, where nothing sees it.
    padding = positions.new_zeros(*positions.shape[:-1], sequence.padded_length - sequence.length)
    padded = torch.cat([positions, padding], -1)
    return shard(padded, sequence.layout, context.mesh.sequence_rank, dim=padded.dim() - 1), *others
