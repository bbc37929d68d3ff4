"""Heads of Hugging Face models that pool in ways of their own (DistilBERT, ModernBERT, EuroBERT): they run on whole sequences.

    forward(input_ids, attention_mask)  whole, for the head picks and weighs tokens by them
      -> base model                     this rank's tokens, as they were given
      -> hidden states                  whole, on every rank of the sequence

The head then computes what it would on one device, on each rank of the sequence alike. It costs the hidden states of one layer, whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_sp.context.step import SequenceContext
from lightning_sp.reductions import unshard

# Of a model's inputs: what a head reads too.
_READ = ("input_ids", "attention_mask")


def give_whole_states(model: Any, context: SequenceContext) -> list[RemovableHandle]:
    """Hook a model and its base model, if it names one; return the hooks."""
    base = getattr(model, getattr(model, "base_model_prefix", "") or "", None)
    if not isinstance(base, nn.Module):
        return []
    shards: dict[str, Tensor] = {}
    return [
        model.register_forward_pre_hook(partial(_unshard_inputs, context, shards), with_kwargs=True),
        base.register_forward_pre_hook(partial(_shard_inputs, shards), with_kwargs=True, prepend=True),
        base.register_forward_hook(partial(_unshard_states, context, shards)),
        # A step may call the base model by itself, later: with its own tokens.
        model.register_forward_hook(lambda *_: shards.clear(), always_call=True),
    ]


def _unshard_inputs(
    context: SequenceContext, shards: dict[str, Tensor], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    shards.clear()
    if context.step is None or context.mesh.layout.size == 1:
        return None
    given = {**dict(zip(_READ, args, strict=False)), **kwargs}
    for name in _READ:
        tensor = given.get(name)
        if isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.shape[1] == context.local_length:
            shards[name] = tensor
    whole = {name: unshard(tensor) for name, tensor in shards.items()}
    positional = [whole.get(name, value) for name, value in zip(_READ, args, strict=False)]
    return (*positional, *args[len(positional) :]), {**kwargs, **{n: v for n, v in whole.items() if n in kwargs}}


def _shard_inputs(
    shards: dict[str, Tensor], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not shards:
        return None
    positional = [shards.get(name, value) for name, value in zip(_READ, args, strict=False)]
    return (*positional, *args[len(positional) :]), {**kwargs, **{n: v for n, v in shards.items() if n in kwargs}}


def _unshard_states(
    context: SequenceContext, shards: dict[str, Tensor], _: nn.Module, inputs: tuple[Any, ...], output: Any
) -> Any:
    states = None if not shards or isinstance(output, Tensor) else output[0]
    if states is None or states.dim() != 3 or states.shape[1] != context.local_length:
        return output
    whole = unshard(states)
    if isinstance(output, tuple):
        return (whole, *output[1:])
    output[next(iter(output))] = whole
    return output
