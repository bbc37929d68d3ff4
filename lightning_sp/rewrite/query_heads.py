"""How many heads a model has: the number that its modules and configs name, else query heads of a trial forward on fake tensors."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._pytree import tree_map_only

from lightning_sp.rewrite.rebind import BoundNames

HEAD_NAMES = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "num_query_heads")
KV_HEAD_NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
# Parts of a config of transformers that are no text: a tower of images or sounds, and what reads its tokens.
_TOWER = re.compile("(vision|image|video|audio|speech|qformer).*_config")
_TOKEN_NAMES = ("input_ids", "input", "inputs", "tokens", "token_ids", "ids", "idx", "x")
_POSITION_NAMES = ("position_ids", "positions")
_TRIAL_TOKENS = 8
# Their `forward` computes nothing: nn.Module's raises, LightningModule's calls that.
_BASE_CLASSES = ("torch.nn.modules.module", "lightning.pytorch.core.module")


def named_query_heads(module: nn.Module) -> int | None:
    """Return the smallest number of query heads that modules or configs name, None if none does. Towers run whole, and do not count."""
    return min(_named(module, HEAD_NAMES), default=None)


def named_kv_heads(module: nn.Module) -> int | None:
    """Return the largest number of key-value heads that modules or configs name, None if none does: an estimate of what a ring sends."""
    return max(_named(module, KV_HEAD_NAMES), default=None)


def _named(module: nn.Module, names: tuple[str, ...]) -> list[int]:
    holders = [holder for each in _without_towers(module) for holder in (each, getattr(each, "config", None))]
    values = [getattr(holder, name, None) for holder in holders if holder is not None for name in names]
    return [value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0]


def _without_towers(module: nn.Module) -> Iterator[nn.Module]:
    configs = [config for each in module.modules() if (config := getattr(each, "config", None)) is not None]
    towers = {id(part) for config in configs for name, part in _parts(config) if _TOWER.fullmatch(name)}
    inside = {
        id(part) for each in module.modules() if id(getattr(each, "config", None)) in towers for part in each.modules()
    }
    yield from (each for each in module.modules() if id(each) not in inside)


def _parts(config: Any) -> list[tuple[str, Any]]:
    return [(name, part) for name, part in getattr(config, "__dict__", {}).items() if hasattr(part, "to_dict")]


def tried_query_heads(module: nn.Module) -> tuple[int | None, str]:
    """Return the smallest number of query heads that reach `F.scaled_dot_product_attention` or `flex_attention` in a forward without data.

    Nothing is computed: the tensors are fake, and parameters on the meta device do as well. The input is the module's
    `example_input_array` (Lightning's name for it), else a few token ids. What the forward changes in the module is the caller's concern.

    Returns:
        The number, None where it cannot be found, and then why.
    """
    target = _with_forward(module)
    if target is None:
        return None, f"{type(module).__name__} has no forward, and not one submodule that has"
    try:
        with (
            _without_tracebacks(),
            FakeTensorMode(allow_non_fake_inputs=True),
            torch.no_grad(),
            _recorded_heads(target) as heads,
        ):
            args, kwargs = _trial_input(module, target)
            functional_call(target, _made_up(target), args, kwargs, tie_weights=False)
    except Exception as error:  # whatever a user's forward raises on a made-up input: then the heads are not known
        return None, f"a forward of {type(target).__name__} without data failed: {type(error).__name__}: {error}"
    if not heads:
        return None, f"a forward of {type(target).__name__} made no call of F.scaled_dot_product_attention"
    return min(heads), ""


def _made_up(module: nn.Module) -> dict[str, Tensor]:
    """Return a tensor for each parameter and buffer, tied ones once; made in the fake mode that is active.

    Of a module that stands in two places the first name alone: `functional_call` puts back what it found last, and would leave made-up
    weights where it comes to a module a second time, as it does for tied weights of its own accord.
    """
    made: dict[int, Tensor] = {}
    state = {}
    for prefix, each in module.named_modules():
        for name, tensor in [*each._parameters.items(), *each._buffers.items()]:
            if tensor is not None:
                made.setdefault(id(tensor), torch.empty(tensor.shape, dtype=tensor.dtype))
                state[f"{prefix}.{name}" if prefix else name] = made[id(tensor)]
    return state


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keep torch from logging the traceback of a forward that fails: the caller is told why."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _with_forward(module: nn.Module) -> nn.Module | None:
    """Return the module itself, or, where it leaves `forward` to its framework's base class, its only submodule."""
    has_forward = type(module).forward.__module__ not in _BASE_CLASSES
    if has_forward or getattr(module, "example_input_array", None) is not None:
        return module
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    return children[0] if len(children) == 1 else None


def _trial_input(module: nn.Module, target: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments of a forward; tensors are made in the fake mode that is active."""
    example = getattr(module, "example_input_array", None)
    if example is not None:
        example = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), example)
        if isinstance(example, Mapping):
            return (), dict(example)
        return (example if isinstance(example, tuple) else (example,)), {}
    kwargs = {}
    for name, parameter in inspect.signature(target.forward).parameters.items():
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
            parameter.POSITIONAL_ONLY,
        )
        if name in _TOKEN_NAMES and (required or name == "input_ids"):
            kwargs[name] = torch.zeros(1, _TRIAL_TOKENS, dtype=torch.long)
        elif name in _POSITION_NAMES and required:
            kwargs[name] = torch.arange(_TRIAL_TOKENS)[None]
        elif required:
            raise TypeError(f"what forward's argument {name!r} takes is not known; set example_input_array")
    return (), kwargs


@contextmanager
def _recorded_heads(model: nn.Module) -> Iterator[list[int]]:
    """Record the head counts of attention calls (B, H, S, D), which return an output of the right shape."""
    heads: list[int] = []

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        heads.append(query.shape[-3])
        return query.new_empty(*query.shape[:-1], value.shape[-1])

    names = BoundNames(model)
    with ExitStack() as undo:
        for holder, name in ((F, "scaled_dot_product_attention"), (torch_flex, "flex_attention")):
            original = getattr(holder, name)
            setattr(holder, name, attention)
            undo.callback(setattr, holder, name, original)
            names.rebind_to(original, attention, undo)
        yield heads
