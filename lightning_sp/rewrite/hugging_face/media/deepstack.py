"""Features of a vision tower's inner layers that a text model adds to its image tokens, layer by layer (DeepStack, arXiv:2406.04334).

They are those of all images, in the order of the placeholders of the whole sequence; a shard's text model adds those of its own placeholders.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.rewrite.hugging_face.media.placement import own_tokens, sequence_of
from lightning_sp.rewrite.hugging_face.models import own_class

# What text models take: where the shard's image tokens are, (rows, tokens) or (rows, tokens, 1), and the features of all of them, by layer.
# Qwen3-VL's, Granite Vision's.
_TAKEN = (("visual_pos_masks", "deepstack_visual_embeds"), ("vision_mask", "deepstack_features"))
_BOTH = ("pixel_values", "pixel_values_videos")


def give_features_of_own_tokens(model: nn.Module, context: SequenceContext, undo: ExitStack) -> None:
    """Let each text model in `model` that adds such features be given those of its own placeholders; `undo` takes that back."""
    for module in model.modules():
        if not hasattr(module, "get_input_embeddings"):
            continue
        parameters = inspect.signature(module.forward).parameters
        for mask, features in _TAKEN:
            if {mask, features} <= parameters.keys():
                hook = partial(_give_own, context, mask, features)
                undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
                refusal = model.register_forward_pre_hook(partial(_refuse_two_kinds, context), with_kwargs=True)
                undo.callback(refusal.remove)


def _give_own(
    context: SequenceContext, mask: str, features: str, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> Any:
    tokens, by_layer = kwargs.get(mask), kwargs.get(features)
    if tokens is None or by_layer is None or (sequence := sequence_of(context, tokens)) is None:
        return None
    own = own_tokens(context, sequence, tokens.flatten(2)[..., 0] if tokens.dim() == 3 else tokens)
    if isinstance(by_layer, dict):
        return args, {**kwargs, features: {layer: each.index_select(0, own) for layer, each in by_layer.items()}}
    return args, {**kwargs, features: [each.index_select(0, own) for each in by_layer]}


def _refuse_two_kinds(context: SequenceContext, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    if context.step is None or context.mesh.layout.size == 1 or any(kwargs.get(name) is None for name in _BOTH):
        return
    raise SequenceParallelError(
        f"{own_class(module).__name__}: the batch has images and videos, whose features of inner layers the model joins by this rank's "
        f"placeholders alone, of {context.mesh.layout.size} ranks of a sequence: give batches of images and batches of videos"
    )
