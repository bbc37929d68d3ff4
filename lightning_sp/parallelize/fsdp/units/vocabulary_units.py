"""Embeddings and heads as units of FSDP of their own: with a large vocabulary they are most of what a model holds beside its blocks.

    in the model's unit    both are whole from the forward's begin to its end, and in all of the backward, with their gradients
    in units of their own  an embedding is whole in its call; a head from its call to its backward, which comes next

A backward of an embedding needs no weight, so none is gathered for it. A head that is called for one part of the tokens after the other is
gathered once, and reduced once, whatever the number of parts on a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from lightning_sp.parallelize.fsdp.freed_behind_runs import is_behind_run
from lightning_sp.parallelize.fsdp.parameter_groups import parameter_groups, shares_parameters
from lightning_sp.parallelize.fsdp.units.module_calls import is_only_called
from lightning_sp.weights.quantized import is_quantized


def vocabulary_layers(root: nn.Module, model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the layers of a model that are to be units, outermost first: what `root` calls as modules alone, and what shares no
    parameter.

    They are what Hugging Face's `get_input_embeddings` and `get_output_embeddings` give, with an adapter around it, and any `nn.Embedding` or
    `nn.Linear` outside of the blocks with as many numbers as the smallest block. None where the model has no blocks.

    Args:
        root: the LightningModule.
        model: a child of it.
        blocks: of all models.
    """
    own = [block for block in blocks if block in set(model.modules())]
    if not own:
        return []
    within = {part for block in own for part in block.modules()}
    size, named = min(map(_numel, own)), _hugging_face(model)
    found: list[nn.Module] = []
    tried: set[nn.Module] = set()  # with what lies within: of an adapter that is no unit its layer is none either
    for layer in model.modules():
        large = isinstance(layer, (nn.Embedding, nn.Linear)) and _numel(layer) >= size
        parts = set(layer.modules())
        if not (layer in named or large) or parts & within or parts & tried:
            continue
        tried |= parts
        holds_table = any(isinstance(part, (nn.Embedding, nn.Linear)) for part in parts)
        whole = any(map(is_quantized, layer.parameters())) or shares_parameters(root, layer)
        if holds_table and not whole and is_only_called(root, layer):
            found.append(layer)
    return found


def heads_among(model: nn.Module, layers: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return those of the layers that come after the model's blocks: their backward begins where their forward has ended."""
    order = {each: number for number, each in enumerate(model.modules())}
    last = max((order[block] for block in blocks if block in order), default=0)
    outputs = _hugging_face(model, "get_output_embeddings")
    return [each for each in layers if each in outputs or order[each] > last]


def needs_no_weight_in_backward(layer: nn.Module) -> bool:
    """Return whether the gradients of a layer are known without its weight. To be asked before it is sharded."""
    return isinstance(layer, nn.Embedding) and type(layer).forward is nn.Embedding.forward


def own_outputs(layer: nn.Module) -> None:
    """Let a linear layer give a tensor that is no view of another. To be called before it is sharded.

    FSDP2 gathers a unit for its backward by a hook of its output. Of several rows, with a bias, torch gives a view of a matrix, and a view
    that is written to in place afterwards (`hidden[~mask] = 0`) loses its hooks.
    """
    if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:
        layer.register_forward_hook(_not_a_view, prepend=True)  # a user's hook gets what the caller gets


def _not_a_view(layer: nn.Module, args: Any, output: Any) -> Any:
    # What torch itself does without a bias. Nobody else holds the matrix.
    return (
        torch.ops.aten._unsafe_view(output, output.shape)
        if type(output) is torch.Tensor and output._is_view()
        else None
    )


def stays_whole_until_backward(head: Any) -> None:
    """Let a sharded head be gathered once for its forward and its backward; without gradients it is freed after each call."""
    head.register_forward_pre_hook(_choose_reshard, prepend=True)
    head.register_forward_hook(_free_gathered)


def _choose_reshard(head: Any, args: Any) -> None:
    head.set_reshard_after_forward(not torch.is_grad_enabled() or is_behind_run(head), recurse=False)


def _free_gathered(head: Any, args: Any, output: Any) -> None:
    """Free the buffer of the head's gather: FSDP2 waits for the next gather of the forward, and the loss comes before one."""
    for context in {id(group.comm_ctx): group.comm_ctx for group in parameter_groups([head])}.values():
        if (gathered := context.all_gather_state) is not None:
            context.all_gather_copy_in_stream.wait_event(gathered.event)
            context.all_gather_stream.wait_event(gathered.event)
            context.all_gather_state = None


def _hugging_face(model: nn.Module, *getters: str) -> set[nn.Module]:
    found: set[nn.Module] = set()
    for each in model.modules():
        for getter in getters or ("get_input_embeddings", "get_output_embeddings"):
            if callable(get := getattr(each, getter, None)):
                with suppress(NotImplementedError, AttributeError):
                    found.update(layer for layer in (get(),) if isinstance(layer, nn.Module))
    return found


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
