"""Attention modules that are known by their structure: four linear layers, whose rows and columns are heads one after the other.

    q_proj (H D, E)    k_proj, v_proj (K D, E)    o_proj (E, H D)          Hugging Face's names
    query              key, value                 output                   those of `models.llama`

A stage has some key-value heads and all query heads that share them. So its rows of each layer lie side by side.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_sp.rewrite.query_heads import HEAD_NAMES, KV_HEAD_NAMES
from lightning_sp.weights.quantized import is_quantized

_PROJECTIONS = (("q_proj", "k_proj", "v_proj", "o_proj"), ("query", "key", "value", "output"))
# What attention to another sequence is given.
_OTHER_SEQUENCES = ("key_value_states", "encoder_hidden_states", "cross_attention_states")


@dataclass(frozen=True, kw_only=True)
class AttentionHeads:
    """The heads of an attention module, in stages.

    Args:
        projections: its layers that make q, k and v.
        others: its modules with parameters that each head has alike: norms over a head.
        num_heads: query heads.
        num_kv_heads: key-value heads.
        head_dim: D.
        num_stages: divides the key-value heads.
    """

    projections: tuple[nn.Linear, nn.Linear, nn.Linear]
    others: tuple[nn.Module, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_stages: int

    def rows(self, projection: nn.Linear, stage: int) -> slice:
        """Return a stage's rows of a projection's weight."""
        num_rows = projection.out_features // self.num_stages
        return slice(stage * num_rows, (stage + 1) * num_rows)

    def attributes(self, module: nn.Module) -> dict[str, int]:
        """Return a module's own numbers of heads, as they are while a stage of it runs."""
        named = {**dict.fromkeys(HEAD_NAMES, self.num_heads), **dict.fromkeys(KV_HEAD_NAMES, self.num_kv_heads)}
        own = vars(module)
        return {name: number // self.num_stages for name, number in named.items() if own.get(name) == number}


def candidates(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that have the four layers by one of the two sets of names."""
    for module in root.modules():
        if _names(module) is not None:
            yield module


def attention_heads(module: nn.Module, num_stages: int, ulysses_size: int) -> AttentionHeads | str:
    """Return the heads of a candidate in stages, or why they cannot be staged."""
    names = _names(module)
    assert names is not None
    q, k, v, o = (getattr(module, name) for name in names)
    for name, layer in zip(names, (q, k, v, o), strict=True):
        if why := _why_not_linear(layer):
            return f"its {name} {why}"
    heads = _numbers_of_heads(module, (q, k, v, o))
    if isinstance(heads, str):
        return heads
    num_heads, num_kv_heads, head_dim = heads
    if why := _why_not_alone(module, (q, k, v, o), head_dim):
        return why
    if num_kv_heads % num_stages:
        return f"its {num_kv_heads} key-value heads do not divide into {num_stages} stages"
    if num_heads // num_stages < ulysses_size:
        return f"a stage has {num_heads // num_stages} of its {num_heads} query heads, and Ulysses {ulysses_size} ranks"
    others = tuple(each for each in module.children() if each not in (q, k, v, o))
    return AttentionHeads(
        projections=(q, k, v), others=others, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, num_stages=num_stages
    )  # fmt: skip


def _names(module: nn.Module) -> tuple[str, ...] | None:
    children = dict(module.named_children())
    return next((names for names in _PROJECTIONS if all(name in children for name in names)), None)


def _why_not_linear(layer: nn.Module) -> str:
    """Return why the rows of a layer cannot be taken, empty where they can."""
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward or "forward" in vars(layer):
        return f"is a {type(layer).__module__}.{type(layer).__name__}, not a plain linear layer (a LoRA's is none)"
    if any(map(is_quantized, layer.parameters())):
        return "has a quantized weight"
    return "has a hook, which would see some heads alone" if _has_hooks(layer) else ""


def _numbers_of_heads(
    module: nn.Module, layers: tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]
) -> tuple[int, int, int] | str:
    """Return the numbers of query heads, of key-value heads, and the head dim; or why they are not known."""
    q, k, v, o = layers
    head_dim = getattr(module, "head_dim", None)
    if not isinstance(head_dim, int) or head_dim < 1:
        return "it has no head_dim, by which its heads would be known"
    if q.out_features != o.in_features:
        return f"it projects to {q.out_features} features of queries and back from {o.in_features}: they hold more than queries"
    if k.out_features != v.out_features or any(each.out_features % head_dim for each in (q, k)):
        return f"its {q.out_features} features of queries, {k.out_features} of keys and {v.out_features} of values are not heads of {head_dim}"
    num_heads, num_kv_heads = q.out_features // head_dim, k.out_features // head_dim
    if num_heads % num_kv_heads:
        return f"its {num_heads} query heads are no multiple of its {num_kv_heads} key-value heads"
    return num_heads, num_kv_heads, head_dim


def _why_not_alone(module: nn.Module, layers: tuple[nn.Linear, ...], head_dim: int) -> str:
    """Return what of a module is not of each head by itself, empty where all is."""
    for name, part in module.named_modules():
        if part in layers:
            continue
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if own and (part is module or any(each.shape != (head_dim,) for each in own)):
            where = f"its {name} has" if name else "it has"
            return f"{where} parameters or buffers that are not of each head alike"
        if part is not module and _has_hooks(part):
            return f"its {name} has a hook, which would see some heads alone"
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            return f"its {name} is random"
    for name, value in vars(module).items():
        if "dropout" in name and isinstance(value, float) and value > 0:
            return f"its {name} is {value}"
        if "shared" in name and value not in (False, None):
            return f"its {name} is {value}: its keys are of another layer, or for another"
    others = [name for name in inspect.signature(module.forward).parameters if name in _OTHER_SEQUENCES]
    return f"it takes {others[0]}, of another sequence" if others else ""


def hooks(heads: AttentionHeads) -> list[tuple[str, str]]:
    """Return the hooks of a module's parts: the part's class, and where the hook is written."""
    parts = [part for own in (*heads.projections, *heads.others) for part in own.modules()]
    return [(type(part).__name__, where) for part in parts for where in _hooks(part)]


def _has_hooks(module: nn.Module) -> bool:
    return any(not where.startswith("lightning_sp.") for where in _hooks(module))


def _hooks(module: nn.Module) -> list[str]:
    own: Any = module
    found = (own._forward_hooks, own._forward_pre_hooks, own._backward_hooks, own._backward_pre_hooks)
    return [str(getattr(hook, "__module__", "")) for each in found for hook in each.values()]
