"""Activation checkpointing of transformer blocks that never repeats the attention or its communication.

Full checkpointing would run the all-to-alls and the ring again in the backward. The policy saves the one attention operator, with its
saved tensors, and recomputes the rest. Recomputation restores the random state of the forward, so dropout masks are the forward's.
Source: selective activation checkpointing, Korthikanti et al., arXiv:2205.05198; PyTorch's create_selective_checkpoint_contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_sp.attention.operator import attention_op
from lightning_sp.parallelize.activation_offload import ActivationOffload
from lightning_sp.parallelize.compilation import without_compilation


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = operator in (torch.ops.lightning_sp.attention.default, attention_op)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


# A module-level partial: under torch.compile the context function must be one.
_contexts = partial(create_selective_checkpoint_contexts, _policy)


def checkpoint_blocks(module: nn.Module, blocks: Sequence[nn.Module], offload: ActivationOffload | None = None) -> None:
    """Make each block recompute itself in the backward. The module tree and every name stay as they were.

    Hugging Face's own checkpointing, where it is on, is switched off: it would repeat the attention and its communication.

    Args:
        module: the model.
        blocks: of it.
        offload: takes the blocks' inputs away between forward and backward; None leaves them in memory.
    """
    for each in own_checkpointing(module):
        each.gradient_checkpointing_disable()  # type: ignore[operator]
    for block in map(without_compilation, blocks):
        # On the instance: a wrapper module would put its own name into every parameter's.
        block.forward = partial(_checkpointed, block.forward, offload)


def own_checkpointing(module: nn.Module) -> list[nn.Module]:
    """Return the models whose own gradient checkpointing is on (`gradient_checkpointing_enable`), outermost first."""
    return [
        each
        for each in module.modules()
        if hasattr(each, "gradient_checkpointing_disable")
        and any(getattr(part, "gradient_checkpointing", False) is True for part in each.modules())
    ]


def _checkpointed(forward: Callable[..., Any], offload: ActivationOffload | None, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    recomputed = partial(checkpoint, use_reentrant=False, context_fn=_contexts)
    return recomputed(forward, *args, **kwargs) if offload is None else offload.run(recomputed, forward, args, kwargs)


@contextmanager
def without_checkpoints(module: nn.Module) -> Iterator[None]:
    """Let the checkpointed blocks of a module keep their activations: a reference run is the user's own."""
    blocks = {each: f for each in module.modules() if isinstance(f := vars(each).get("forward"), partial)}
    checkpointed = {block: forward for block, forward in blocks.items() if forward.func is _checkpointed}
    for block, forward in checkpointed.items():
        block.forward = forward.args[0]
    try:
        yield
    finally:
        for block, forward in checkpointed.items():
            block.forward = forward
