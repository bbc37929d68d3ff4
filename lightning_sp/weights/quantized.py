"""Quantized weights of a frozen model, as QLoRA trains adapters on: they stay whole on every rank, and are the same on all.

A 4-bit weight is bytes and what turns them into numbers (scales, a table). FSDP2 would split the bytes alone. They have no gradient and no
optimizer state, so that nothing is lost but the memory of the bytes: a quarter of a bfloat16 model's, whole on each rank.
Two forms are known: a parameter with bitsandbytes' `quant_state`, and a subclass of tensor that says what it is made of
(`__tensor_flatten__`: torchao).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_sp import comm
from lightning_sp.parameter_names import shown, user_name

# The attribute of a module with what its quantized weights were when it was sharded.
_READ = "_lightning_sp_quantized"


class QuantizedWeight(NamedTuple):
    """What tells one quantized weight from another."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: str


def is_quantized(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a frozen weight in one of the two forms."""
    if parameter.requires_grad or isinstance(parameter.data, DTensor):
        return False
    return getattr(parameter, "quant_state", None) is not None or hasattr(type(parameter.data), "__tensor_flatten__")


def quantized_parameters(root: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's quantized weights by name."""
    return {name: each for name, each in root.named_parameters() if is_quantized(each)}


def quantized_weights(root: nn.Module) -> Mapping[str, QuantizedWeight]:
    """Return what a model's quantized weights are, by the user's names: as they were read, where `check_same_quantized` has noted it."""
    noted: Mapping[str, QuantizedWeight] | None = vars(root).get(_READ)
    if noted is not None:
        return noted
    found = quantized_parameters(root).items()
    return {user_name(n): QuantizedWeight(tuple(each.shape), each.dtype, _digest(each)) for n, each in found}


def check_same_quantized(root: nn.Module, group: ProcessGroup | None = None) -> None:
    """Refuse ranks whose quantized weights are not rank 0's, to the bit, and note what they are. Every rank must call it.

    Their own forward may pack them anew, in another form.

    Communicates: the name and a digest of each quantized weight, from each rank.

    Raises:
        SequenceParallelError: with the first names. Rank 0's values are not sent: each rank reads the same model.
    """
    own = quantized_weights(root)
    every = comm.gather_objects(own, group)
    if not any(every):
        return
    differing = [name for name in every[0] if any(each.get(name) != every[0][name] for each in every)]
    differing += [name for each in every for name in each if name not in every[0]]
    comm.agree(
        f"{len(differing)} of {len(every[0])} quantized weights are not the same on all ranks ({shown(differing)}): each rank keeps them whole, "
        "and rank 0's are not sent to the others; read the same model on every rank, by from_pretrained, before a rank draws or changes anything"
        if differing
        else None,
        group,
    )
    setattr(root, _READ, own)


def move(root: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Apply a function to all parameters and buffers but the quantized weights, as `nn.Module.to_empty` does to all."""
    whole = {id(each) for each in quantized_parameters(root).values()}
    root._apply(lambda tensor: tensor if id(tensor) in whole else make(tensor))  # type: ignore[no-untyped-call]


def _digest(parameter: nn.Parameter) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in _tensors(parameter):
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _tensors(parameter: nn.Parameter) -> Iterator[Tensor]:
    """Give the plain tensors that a quantized weight is made of."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        yield from _inner(parameter.data)
        return
    yield parameter.data
    for _, value in sorted(state.as_dict(packed=True).items()):
        yield value


def _inner(tensor: Tensor) -> Iterator[Tensor]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from _inner(getattr(tensor, name))
