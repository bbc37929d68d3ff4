"""PEFT's virtual tokens: trained vectors before the sequence, each where its global position lies.

    one device      v0 v1 | t0 t1 t2 t3 t4 t5               PEFT puts them before the embeddings that it is given
    the batch       .  .    t0 t1 t2 t3 t4 t5               has room for them before it is split (`data/batch/contents/virtual_tokens.py`)
    two ranks       v0 v1   t0 t1 | t2 t3 t4 t5             each puts those into its part that lie there

Prompt tuning (Lester et al., 2021, arXiv 2104.08691), P-tuning (Liu et al., 2021, arXiv 2103.10385) and multitask prompt tuning.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.parameter_names import user_name
from lightning_sp.rewrite.hugging_face.generation import delete_attribute
from lightning_sp.rewrite.hugging_face.models import own_class

_KINDS = ("PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING")
_MODEL = "PeftModelForCausalLM"


def num_virtual_tokens(module: nn.Module) -> int:
    """Return how many virtual tokens stand before a module's sequence."""
    return sum(int(config.num_virtual_tokens) for _, _, config in _with_virtual_tokens(module))


def why_no_virtual_tokens(module: nn.Module) -> str:
    """Return why a module's virtual tokens have no place in a part of a sequence, "" where they have. Equal on all ranks.

    They are of a kind that stands elsewhere, of a model with another loss, or of several models.
    """
    found = 0
    for name, model, config in _with_virtual_tokens(module):
        kind = getattr(config.peft_type, "value", config.peft_type)
        said = f"{user_name(name) or 'the model'} has PEFT's {type(config).__name__} with {config.num_virtual_tokens} virtual tokens"
        if kind not in _KINDS:
            return (
                f"{said}, which are keys and values of each layer and no part of the sequence: on shards they would stand before each part; use "
                "the global view, or prompt tuning, P-tuning, LoRA, DoRA or IA3"
            )
        if not any(base.__name__ == _MODEL for base in type(model).__mro__):
            return (
                f"{said} in a {own_class(model).__name__}: where they stand in the sequence that its head reads is known for {_MODEL} alone; "
                'use the global view, task_type="CAUSAL_LM", or LoRA, DoRA or IA3'
            )
        if found:
            return (
                f"{said}, and another model of the module has {found}: the batch has room for those of one model; use the global view, or LoRA "
                "in one of them"
            )
        found = int(config.num_virtual_tokens)
    return ""


def place_virtual_tokens(module: nn.Module, context: SequenceContext, undo: ExitStack) -> None:
    """Let PEFT's models put their virtual tokens where the global positions are those before the sequence.

    Args:
        module: the user's.
        context: of the step.
        undo: takes it back.
    """
    for _, model, _ in _with_virtual_tokens(module):
        _place(model, context)
        undo.callback(delete_attribute, model, "forward")


def _place(model: Any, context: SequenceContext) -> None:
    original = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:  # a partial would be taken for a module's checkpointing
        return _forward(context, model, original, *args, **kwargs)

    model.forward = forward


def _with_virtual_tokens(module: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield each of PEFT's models whose adapter in use has virtual tokens, with its name and that adapter's configuration."""
    for name, model in module.named_modules():
        configs, active = getattr(model, "peft_config", None), getattr(model, "active_adapter", None)
        if isinstance(configs, dict) and isinstance(active, str):  # of an adapter within the layers it is a list
            config = configs.get(active)
            if getattr(config, "is_prompt_learning", False):
                yield name, model, config


def _forward(context: SequenceContext, model: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if context.step is None:
        return original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs)
    named = {**given.arguments, **given.arguments.get("kwargs", {})}
    named.pop("kwargs", None)
    named.pop("position_ids", None)  # PEFT drops a user's, and those of the strategy are handed to the model within
    ids, embeddings = named.pop("input_ids", None), named.pop("inputs_embeds", None)
    if embeddings is None:
        embeddings = model.word_embeddings(ids)
    sequence = context.step.batch
    config = model.active_peft_config
    positions = sequence.position_ids
    if positions is None or embeddings.shape[:2] != positions.shape:
        raise SequenceParallelError(
            f"{type(model).__name__} got tokens of shape {tuple(embeddings.shape[:2])}, where this rank holds "
            f"{tuple(positions.shape) if positions is not None else 'none'} of the batch, the whole's "
            f"{config.num_virtual_tokens} virtual tokens among them: call it with the batch's own tokens"
        )
    prompts = model.get_prompt(batch_size=len(embeddings), task_ids=named.get("task_ids")).to(embeddings.dtype)
    rows = torch.arange(len(embeddings), device=positions.device)[:, None]
    own = prompts[rows, positions.clamp(max=config.num_virtual_tokens - 1)]
    placed = torch.where((positions < config.num_virtual_tokens)[..., None], own, embeddings)
    # What is left for PEFT to put before a mask, labels and embeddings is nothing.
    with (
        patch.object(config, "num_virtual_tokens", 0),
        patch.object(model, "get_prompt", lambda *_, **__: prompts[:, :0]),
    ):
        return original(inputs_embeds=placed, **named)
