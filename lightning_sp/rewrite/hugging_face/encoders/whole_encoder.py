"""An encoder that reads sounds or images, beside a decoder whose tokens are split: it runs whole on every rank.

    input_features                          labels
        |                                      |
    encoder        whole, on every rank    decoder       each rank's own tokens
        |                                      |
        +-----> keys and values -----> cross attention   each rank's queries over the whole

Each rank's queries give the encoder a part of its gradient, which FSDP2 adds up. The three are known by their structure.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from lightning_sp.context.step import SequenceContext
from lightning_sp.rewrite.hugging_face.encoders.encoder_decoder import is_encoder_decoder
from lightning_sp.rewrite.hugging_face.generation import delete_attribute

# What cross attention is given its keys by.
_KEYS = ("key_value_states", "encoder_hidden_states")
# Sums up a mask of the encoder's own tokens.
_METHOD = "_get_feature_vector_attention_mask"


def run_encoder_whole(model: Any, context: SequenceContext, undo: ExitStack) -> None:
    """Let a model's encoder and its cross attention run whole in steps whose batch holds its decoder's sequence alone.

    `undo` takes that back.
    """
    if not is_encoder_decoder(model):
        return
    context.unsharded.add_encoder(model.get_encoder(), undo)
    for module, argument in _cross_attention(model):
        context.unsharded.add_cross_attention(module, argument, undo)
    for each in model.modules():
        if hasattr(each, _METHOD):
            setattr(each, _METHOD, partial(_outside_of_step, context, getattr(each, _METHOD)))
            undo.callback(delete_attribute, each, _METHOD)


def _cross_attention(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield each innermost module that may be given the encoder's output, with the argument that takes it."""
    named = {module: name for module in model.modules() if (name := _argument(module)) is not None}
    for module, name in named.items():
        if not any(each in named for each in module.modules() if each is not module):
            yield module, name


def _argument(module: nn.Module) -> str | None:
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in _KEYS if name in parameters), None)


def _outside_of_step(context: SequenceContext, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with context.unsharded.suspended():
        return original(*args, **kwargs)
