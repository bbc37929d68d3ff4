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

from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext
from lightning_sp.reductions import unshard

# Of a model's inputs: what a head reads too.
_READ = ("input_ids", "attention_mask")


class _Running:
    """A forward of the model: this rank's part of what it was given; None while none runs."""

    shards: dict[str, Tensor] | None = None


def give_whole_states(model: Any, context: SequenceContext) -> list[RemovableHandle]:
    """Hook a model and its base model, if it names one; return the hooks."""
    base = getattr(model, getattr(model, "base_model_prefix", "") or "", None)
    if not isinstance(base, nn.Module):
        return []
    running = _Running()
    return [
        model.register_forward_pre_hook(partial(_unshard_inputs, context, running), with_kwargs=True),
        base.register_forward_pre_hook(partial(_shard_inputs, running), with_kwargs=True, prepend=True),
        base.register_forward_hook(partial(_unshard_states, context, running)),
        # A step may call the base model by itself, later: with its own tokens.
        model.register_forward_hook(partial(_end, running), always_call=True),
    ]


def _unshard_inputs(
    context: SequenceContext, running: _Running, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    running.shards = None
    if context.step is None:
        return None
    given = {**dict(zip(_READ, args, strict=False)), **kwargs}
    running.shards = {
        name: tensor
        for name in _READ
        if isinstance(tensor := given.get(name), Tensor)
        and tensor.dim() == 2
        and _sequence_of(context, tensor) is not None
    }
    return _replaced({name: _whole(context, tensor) for name, tensor in running.shards.items()}, args, kwargs)


def _shard_inputs(
    running: _Running, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    return None if running.shards is None else _replaced(running.shards, args, kwargs)


def _replaced(
    tensors: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a forward's arguments with other tensors for those of the same names."""
    positional = [tensors.get(name, value) for name, value in zip(_READ, args, strict=False)]
    named = {name: tensors.get(name, value) for name, value in kwargs.items()}
    return (*positional, *args[len(positional) :]), named


def _unshard_states(
    context: SequenceContext, running: _Running, _: nn.Module, inputs: tuple[Any, ...], output: Any
) -> Any:
    states = None if running.shards is None or isinstance(output, Tensor) else output[0]
    if states is None or states.dim() != 3 or _sequence_of(context, states) is None:
        return output
    whole = _whole(context, states)
    if isinstance(output, tuple):
        return (whole, *output[1:])
    output[next(iter(output))] = whole
    return output


def _sequence_of(context: SequenceContext, tensor: Tensor) -> SequenceInfo | None:
    """Return the batch's sequence whose tokens on this rank a tensor has as dim 1: of an encoder-decoder one of two."""
    step = context.step
    lengths = () if step is None else step.batch.sequences
    return next((each for each in lengths if context.local_tokens(each) == tensor.shape[1]), None)


def _whole(context: SequenceContext, tensor: Tensor) -> Tensor:
    sequence = _sequence_of(context, tensor)
    assert sequence is not None
    # A single rank has the whole, but for padding that tells two sequences apart.
    return unshard(tensor) if context.mesh.layout.size > 1 else tensor.narrow(1, 0, sequence.length)


def _end(running: _Running, *_: Any) -> None:
    running.shards = None
