"""Interception of Hugging Face models: their attention interface, with a mask function of ours; nothing of the model is edited.

Each strategy registers its own pair of functions under its own name, bound to its context, and takes them back. A custom attention without
a registered mask function gets no mask at all, silently: ours receives every mask the model asks for. The hooks and wrappers beside it hand
the model its positions, its shifted labels, its biases and rotary frequencies of the whole sequence.
"""

from __future__ import annotations

import itertools
import sys
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from torch import nn

from lightning_sp.context.step import SequenceContext
from lightning_sp.rewrite.hugging_face.attention import BIASES, attention_forward, whole_attention_forward
from lightning_sp.rewrite.hugging_face.generation import refuse_generation
from lightning_sp.rewrite.hugging_face.loss import wrap_loss
from lightning_sp.rewrite.hugging_face.masks import requested_mask
from lightning_sp.rewrite.hugging_face.models import check_model, hugging_face_models, own_class
from lightning_sp.rewrite.hugging_face.position_embeddings import pass_positions_to_embeddings
from lightning_sp.rewrite.hugging_face.position_ids import pass_position_ids
from lightning_sp.rewrite.hugging_face.relative_bias import wrap_relative_bias
from lightning_sp.rewrite.hugging_face.rotary import wrap_rotary

_numbers = itertools.count()


class HuggingFaceRewrite(AbstractContextManager[None]):
    """Routes the attention, masks, positions and loss of a module's Hugging Face models through the context, until it exits."""

    def __init__(self, context: SequenceContext, module: nn.Module) -> None:
        self.context = context
        self.models = hugging_face_models(module)
        self._undo = ExitStack()

    def __enter__(self) -> None:
        if not self.models:
            return
        # The interface refuses names with "sdpa", "flash", "flex" or "/".
        for model in self.models:
            check_model(model)
            previous = model.config._attn_implementation
            name = f"sequence_parallel_{next(_numbers)}"
            _register(name, self.context, previous, self._undo)
            model.set_attn_implementation(name)
            self._undo.callback(model.set_attn_implementation, previous)
            hook = model.register_forward_pre_hook(
                partial(pass_position_ids, self.context), with_kwargs=True, prepend=True
            )
            self._undo.callback(hook.remove)
            wrap_loss(model, self.context, self._undo)
            refuse_generation(model, self.context, self._undo)
            wrap_rotary(model, self.context, self._undo)
            wrap_relative_bias(model, self.context, self._undo)
            if getattr(model.config, "is_encoder_decoder", False):
                pass_positions_to_embeddings(model, self.context, self._undo)

    def __exit__(self, *_: object) -> None:
        self._undo.close()


def _register(name: str, context: SequenceContext, previous: str, undo: ExitStack) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: PLC0415
    from transformers.masking_utils import sdpa_mask  # noqa: PLC0415

    masks = AttentionMaskInterface()

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if context.reference is not None:
            own = ("s_aux", "softcap", *BIASES)
            if kwargs.get("dropout") or any(kwargs.get(name) is not None for name in own):
                # Torch's function would drop these, silently, and draw dropout of its own.
                return whole_attention_forward(context, module, *args, **kwargs)
            # In the precision of the operator: the eager softmax computes in float32 even in a float64 model.
            return sdpa_attention_forward(module, *args, **kwargs)
        eager = getattr(sys.modules[own_class(module).__module__], "eager_attention_forward", sdpa_attention_forward)
        return AttentionInterface().get_interface(previous, eager)(module, *args, **kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        return (sdpa_mask if context.reference is not None else masks[previous])(*args, **kwargs)

    AttentionInterface.register(name, partial(attention_forward, context, attention))
    AttentionMaskInterface.register(name, partial(requested_mask, context, mask))
    for interface in (AttentionInterface, AttentionMaskInterface):
        undo.callback(interface._global_mapping.pop, name, None)
