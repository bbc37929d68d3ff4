"""What a model is made of beside its parameters: torch's own layers and their numbers, by which ranks with other ones would train apart.

Not the attributes of a user's own classes: a rank may have its number, a path or a clock there.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_sp.parameter_names import user_name


def parts_of_model(module: nn.Module) -> dict[str, str]:
    """Return torch's layers of a model in words, by name: the class, and what it shows of itself (`nn.Dropout(p=0.1)`)."""
    return {name: _words(each) for name, each in module.named_modules() if _is_layer(_kind(each))}


def differing_parts(own: Mapping[str, str], first: Mapping[str, str]) -> str:
    """Return how many layers are not rank 0's, with the first of them; empty for none.

    Args:
        own: of `parts_of_model`.
        first: rank 0's.
    """
    names = [name for name in dict.fromkeys([*own, *first]) if own.get(name) != first.get(name)]
    if not names:
        return ""
    name = names[0]
    more = f", and {len(names) - 1} other layers" if len(names) > 1 else ""
    return f"{user_name(name)} is {own.get(name, 'no layer of torch')}, on rank 0 {first.get(name, 'none')}{more}"


def _is_layer(kind: type[nn.Module]) -> bool:
    # Lists of parameters show their device.
    return kind.__module__.startswith("torch.nn.") and not issubclass(kind, (nn.ParameterList, nn.ParameterDict))


def _kind(module: nn.Module) -> type[nn.Module]:
    # A layer of FSDP2 has a class of its own, derived from the one that it was.
    kinds = (each for each in type(module).__mro__ if issubclass(each, nn.Module))
    return next(each for each in kinds if not issubclass(each, FSDPModule))


def _words(module: nn.Module) -> str:
    return f"{_kind(module).__name__}({module.extra_repr()})"
