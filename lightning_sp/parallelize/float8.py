"""Linear layers whose products are of float8 numbers, by torchao: the recipe that gives on parts of a sequence what one device gives.

    out    = float8(x) @ float8(W)^T      a scale for each token of x, and for each row of W
    grad x = float8(grad) @ float8(W)     a scale for each token of grad, one for W
    grad W = grad^T @ x                   in x's own dtype: it adds up over tokens, and ranks add up their parts

No scale looks at two tokens, so a rank's part is rounded as it is in the whole. torchao's other recipes take the largest number of all
tokens ("tensorwise"), or scale over tokens for grad W ("rowwise"): each rank would round by its own tokens.
Source: torchao.float8, `Float8LinearRecipeName.ROWWISE_WITH_GW_HP`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parameter_names import user_name

RECIPE = "rowwise_with_gw_hp"
# torch's product of float8 numbers takes sizes that 16 divides. A smaller layer (a router, an adapter) would not pay.
_LEAST, _DIVISOR = 128, 16
# With scales by rows: Hopper.
_CAPABILITY = (9, 0)
# How a layer that chooses among experts is called, in Hugging Face's models and in torchtitan's.
_ROUTERS = ("gate", "router")


def check_float8_device(given: bool | Literal["emulated"], device: torch.device) -> None:
    """Refuse float8 products where there is no torchao, or no hardware that has them. Equal on all ranks of one kind.

    Args:
        given: the option `fp8`.
        device: of this rank.

    Raises:
        SequenceParallelError: with what is there.
    """
    if not given:
        return
    if find_spec("torchao") is None:
        raise SequenceParallelError(
            f"fp8={given!r}: torchao, which makes the layers, is not installed; pip install 'lightning-sp[torchao]'"
        )
    if given == "emulated":
        return
    emulated = "fp8='emulated' rounds alike, without its speed"
    if device.type != "cuda":
        raise SequenceParallelError(
            f"fp8=True on {device.type} ranks: products of float8 numbers are of GPUs; leave it out, or {emulated}"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        raise SequenceParallelError(
            f"fp8=True on {torch.cuda.get_device_name(device)}, of compute capability {capability[0]}.{capability[1]}: scales by rows need "
            f"{_CAPABILITY[0]}.{_CAPABILITY[1]} or more (H100); leave it out, or {emulated}"
        )


def convert_to_float8(blocks: Iterable[nn.Module], given: bool | Literal["emulated"]) -> int:
    """Make the large linear layers of transformer blocks float8's, in place; return how many. Parameters and names stay as they were.

    Args:
        blocks: of the model, not yet sharded. What is outside of them (embedding, head) stays as it is.
        given: the option `fp8`; False converts nothing.
    """
    if not given:
        return 0
    float8: Any = importlib.import_module("torchao.float8")
    config = replace(float8.Float8LinearConfig.from_recipe_name(RECIPE), emulate=given == "emulated")
    converted: set[nn.Module] = set()
    for block in blocks:
        float8.convert_to_float8_training(block, module_filter_fn=_is_large, config=config)
        converted.update(module for _, module in _float8_layers(block))
    return len(converted)


def _is_large(module: nn.Module, name: str) -> bool:
    plain = (
        isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and "forward" not in vars(module)
    )
    if not plain:
        return False
    sizes: tuple[int, int] = (module.in_features, module.out_features)  # type: ignore[assignment]
    routes = name.rpartition(".")[2] in _ROUTERS and sizes[1] < sizes[0]  # an MLP's gate widens
    return not routes and all(size >= _LEAST and size % _DIVISOR == 0 for size in sizes)


def check_float8_layers(root: nn.Module, num_ranks: int) -> None:
    """Refuse layers that the user made float8's by a recipe that looks along the sequence. Equal on all ranks.

    Args:
        root: the model.
        num_ranks: that share a sequence; of one nothing is refused.

    Raises:
        SequenceParallelError: with the first layer, and the recipe that is one device's.
    """
    if num_ranks == 1:
        return
    for name, module in _float8_layers(root):
        if why := _looks_along_tokens(module.config):
            raise SequenceParallelError(
                f"{user_name(name)} is a Float8Linear that {why}: each of the {num_ranks} ranks of a sequence would scale by its own tokens "
                f"alone, and round otherwise than one device; pass fp8=True instead, or convert by "
                f"Float8LinearConfig.from_recipe_name({RECIPE!r})"
            )


def _float8_layers(root: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in root.named_modules():
        kind = type(module)
        if kind.__name__ == "Float8Linear" and kind.__module__.startswith("torchao."):
            yield name, module


def _looks_along_tokens(config: Any) -> str:
    """Return how a recipe scales numbers of several tokens together; nothing where it does not."""
    for what, cast in (("input", config.cast_config_input), ("gradient", config.cast_config_grad_output)):
        if _scales(cast) and cast.scaling_granularity.name != "AXISWISE":
            return f"scales its {what} by the largest number of all tokens"
    for cast in (config.cast_config_input_for_grad_weight, config.cast_config_grad_output_for_grad_weight):
        if _scales(cast):
            return "scales over tokens for its weight's gradient"
    return ""


def _scales(cast: Any) -> bool:
    return bool(cast.scaling_type.name != "DISABLED")
