"""`model.generate` inside a step continues whole prompts, on every rank of a sequence alike; outside of one it is the model's own."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_sp.context.step import SequenceContext
from lightning_sp.context.streams import streams_from
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor
from lightning_sp.rewrite.hugging_face.models import hugging_face_models
from lightning_sp.rewrite.hugging_face.whole_sequence import whole_tokens

# What sharding adds to a batch, which `model.generate(**batch)` hands on.
_ADDED = ("position_ids", "shift_labels")


class WholeGeneration(AbstractContextManager[None]):
    """Lets the Hugging Face models of a module generate from whole prompts, until it exits.

    Args:
        context: with a step in progress, or none.
        module: of the models.
    """

    def __init__(self, context: SequenceContext, module: nn.Module) -> None:
        self._context = context
        self._module = module
        self._undo = ExitStack()

    def __enter__(self) -> None:
        for model in hugging_face_models(self._module):
            if hasattr(model, "generate"):
                model.generate = partial(_generate, self._context, model.generate)
                self._undo.callback(delete_attribute, model, "generate")

    def __exit__(self, *_: object) -> None:
        self._undo.close()


def _generate(context: SequenceContext, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate as one device does. Every rank of a sequence runs all of it; what is drawn they draw alike.

    Communicates: one all_gather for each prompt, mask or position among the arguments. Where data-parallel groups have prompts of their own, one
    all_reduce for each token, until all have ended: FSDP gathers a model's weights from all ranks.
    """
    step = context.step
    if step is None and context.reference is None:
        return original(*args, **kwargs)
    if context.mesh.data_parallel_size > 1:
        kwargs.setdefault("synced_gpus", True)
    if step is None:
        return original(*args, **kwargs)
    step.num_reductions += 1
    given = {name: value for name, value in kwargs.items() if name not in _ADDED or name in step.batch.names}
    args, given = tree_map(partial(_whole, context), (args, given))
    device = next((each.device for each in tree_leaves((args, given)) if isinstance(each, Tensor)), torch.device("cpu"))
    # In the global view the ranks of a sequence draw alike already, and a trial compares with what one device draws.
    drawn = nullcontext() if context.global_view else streams_from(step.batch.seed, device)
    with drawn, context.inactive():
        return original(*args, **given)


def _whole(context: SequenceContext, value: Any) -> Any:
    """Return a tensor of this rank's tokens, (rows, tokens, ...), whole; anything else as it is."""
    if isinstance(value, SequenceTensor):
        return value.whole()
    if not isinstance(value, Tensor) or value.dim() < 2 or context.global_view or context.mesh.layout.size == 1:
        return value
    assert context.step is not None
    for sequence in context.step.batch.sequences:
        if tuple(value.shape[:2]) == (sequence.rows, context.local_tokens(sequence)):
            return whole_tokens(context, sequence, value)
    return value


def delete_attribute(target: Any, name: str) -> None:
    """Delete an attribute that was set on an object itself, so that its class's own shows again."""
    if name in vars(target):
        delattr(target, name)
