"""Models within a Hugging Face model that a step calls by themselves: `self.model.model(...)`, `self.model.get_encoder()(...)`.

They get the positions that the whole model would hand them.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from lightning_sp.context.step import SequenceContext
from lightning_sp.rewrite.hugging_face.positions.position_count import PositionCounts, position_counts
from lightning_sp.rewrite.hugging_face.positions.position_ids import pass_position_ids


def pass_positions_to_base_models(model: Any, context: SequenceContext, undo: ExitStack) -> None:
    """Hand positions to each model of tokens within a model, where the model itself is not called.

    Args:
        model: the outermost Hugging Face model.
        context: of the step.
        undo: takes it back.
    """
    from transformers import PreTrainedModel  # noqa: PLC0415

    inner = [each for each in model.modules() if isinstance(each, PreTrainedModel) and each is not model]
    tokens = [each for each in inner if "input_ids" in inspect.signature(each.forward).parameters]
    if not tokens:
        return
    calls = _Calls(context)
    for each in (model, *tokens):
        enter = calls.enter_whole if each is model else calls.enter
        undo.callback(each.register_forward_pre_hook(enter, with_kwargs=True, prepend=True).remove)
        undo.callback(each.register_forward_hook(calls.leave, always_call=True).remove)


class _Calls:
    """The calls in progress of a model and of those within it; a class because the outermost one alone gets positions."""

    def __init__(self, context: SequenceContext) -> None:
        self.context = context
        self._depth = 0
        self._counts: dict[nn.Module, PositionCounts] = {}

    def enter_whole(self, model: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._depth += 1

    def enter(self, model: Any, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        self._depth += 1
        if self._depth > 1:
            return None
        if model not in self._counts:
            self._counts[model] = position_counts(model)
        return pass_position_ids(self.context, self._counts[model], model, args, kwargs)

    def leave(self, model: Any, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._depth -= 1
