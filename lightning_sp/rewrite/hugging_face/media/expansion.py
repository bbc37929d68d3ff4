"""Models that put a sound in the place of one placeholder, or of as many as it has tokens: they tell by two placeholders side by side.

    input_ids   t <sound> <sound> | <sound> t t t        two ranks of one sequence: the second has no two

One for a whole sound makes the sequence longer than the one that was split. The older of the two ways, it is refused.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.rewrite.hugging_face.generation import delete_attribute
from lightning_sp.rewrite.hugging_face.media.placement import (
    leave_checks_to_us,
    names_of,
    placeholder_ids,
)
from lightning_sp.rewrite.hugging_face.models import own_class
from lightning_sp.rewrite.hugging_face.whole_sequence import whole_tokens

# The older way has a method of its own, and is not taken in compiled code.
_METHOD, _COMPILES = "_merge_input_ids_with_", "is_torchdynamo_compiling"


def tell_placeholders_by_whole_sequence(model: Any, context: SequenceContext, undo: ExitStack) -> bool:
    """Let each part of a model that looks for placeholders side by side go by the whole sequence; return whether there is any.

    `undo` takes that back.
    """
    found = [each for each in model.modules() if _has_two_ways(each)]
    for each in found:
        leave_checks_to_us(context, each, undo)
        _take_newer_way(context, each, undo)
    return bool(found)


def _has_two_ways(module: nn.Module) -> bool:
    merges = any(name.startswith(_METHOD) for name in dir(type(module)))
    return merges and _COMPILES in names_of(module.forward)


def _take_newer_way(context: SequenceContext, module: nn.Module, undo: ExitStack) -> None:
    original, own = module.forward, vars(module).get("forward")
    signature, names = inspect.signature(original), names_of(original)

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        ids, sounds = given.get("input_ids"), given.get("input_features")
        if not isinstance(ids, Tensor) or sounds is None or (sequence := _sequence_of(context, ids)) is None:
            return original(*args, **kwargs)
        _check_expanded(context, module, sequence, ids, len(sounds))
        with patch.dict(names, {_COMPILES: lambda: True}):
            return original(*args, **kwargs)

    module.forward = forward
    undo.callback(
        partial(delete_attribute, module, "forward") if own is None else partial(setattr, module, "forward", own)
    )


def _sequence_of(context: SequenceContext, ids: Tensor) -> SequenceInfo | None:
    """Return the sequence of which this rank has these ids; also where the preflight took the whole model for a tower.

    A sequence that becomes longer has no attention that follows it.
    """
    step = context.unsharded.suspended_step if context.step is None else context.step
    if step is None or context.mesh.layout.size == 1:
        return None
    return next((s for s in step.batch.sequences if ids.shape == (s.rows, context.local_tokens(s))), None)


def _check_expanded(
    context: SequenceContext, module: nn.Module, sequence: SequenceInfo, ids: Any, num_sounds: int
) -> None:
    """Refuse a whole sequence without two placeholders side by side. Equal on all ranks."""
    (placeholder,) = placeholder_ids([module])
    here = whole_tokens(context, sequence, ids) == placeholder
    if not bool((here[:, :-1] & here[:, 1:]).any()):
        raise SequenceParallelError(
            f"{own_class(module).__name__}: the batch has {num_sounds} sounds and {int(here.sum())} placeholders in its text, no two side by "
            "side: one for a whole sound would make the sequence longer after it was split; give one placeholder for each token of a sound, as "
            "the model's processor does"
        )
