"""LayerDrop of Hugging Face models (M2M100, BART, Wav2Vec2): all ranks skip the same layers.

The models draw `torch.rand([])` for each layer and skip it below `layerdrop`. FSDP gathers a layer from all ranks, so that all must run it or
none. Here the number is drawn alike on all ranks, anew for each micro-batch. In the preflight no layer is skipped.
Source: LayerDrop, Fan et al., arXiv:1909.11556.
"""

from __future__ import annotations

import inspect
import random
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.rewrite.hugging_face.models import own_class

# How a model draws, in its source.
_DRAW = "torch.rand([])"
_OTHER_DRAWS = ("random.uniform(", "random.random(", "np.random.")


def skip_layers_alike(model: Any, context: SequenceContext, undo: ExitStack) -> None:
    """Draw a model's LayerDrop alike on all ranks; `undo` takes that back.

    Raises:
        SequenceParallelError: the model's file draws in another way.
    """
    dropping = [each for each in model.modules() if _skips(each)]
    if not dropping or context.mesh.base.size() == 1:
        return
    for each in dropping:
        _check_draws(each)
    original = torch.rand

    def rand(*size: Any, **options: Any) -> Tensor:
        if size not in (([],), ((),)) or options:
            return original(*size, **options)
        # FSDP gathers a tower's layers from all ranks, too, and those of a step without a sequence.
        step = context.loss_step or context.unsharded.suspended_step
        if context.reference is not None or (
            step is not None and step.batch.dropout is not None and step.batch.dropout.off
        ):
            return torch.ones(())  # of the preflight: no probability is above it
        if step is None or step.batch.dropout is None:
            return original(*size)
        drawn = step.batch.dropout
        numbers = (drawn.seed, drawn.step, drawn.micro_batch, step.dropout_calls.number())
        return torch.tensor(random.Random(str(numbers)).random())

    torch.rand = rand
    undo.callback(setattr, torch, "rand", original)


def _skips(module: nn.Module) -> bool:
    """Return whether a module's own code skips layers by a probability above 0."""
    found = getattr(module, "layerdrop", None)
    if not isinstance(found, float):
        found = getattr(getattr(module, "config", None), "layerdrop", None)
    return isinstance(found, float) and found > 0 and "layerdrop" in _source(module)


def _source(module: nn.Module) -> str:
    try:
        return inspect.getsource(own_class(module))
    except (OSError, TypeError):
        return ""


def _check_draws(module: nn.Module) -> None:
    source = _source(module)
    if _DRAW not in source and any(each in source for each in _OTHER_DRAWS):
        raise SequenceParallelError(
            f"{own_class(module).__name__} skips layers by its layerdrop, and does not draw by {_DRAW}: each rank would skip other layers than "
            "its peers, and wait for them; set it to 0"
        )
