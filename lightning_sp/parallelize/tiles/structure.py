"""Which modules of a block take each token by itself, as far as their structure tells: MLPs, experts, and the norms beside them.

    MLP            one input, two linear layers and more
    experts        hidden states, each token's chosen experts and their weights; parameters of their own, or MLPs in a list
    MLPs in a list by themselves: what chooses among them may look at all tokens

What a structure cannot tell (a capacity, tokens that are compared) a trial looks for.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_sp.mesh import gathered_shape
from lightning_sp.parallelize.compilation import without_compilation

# Children of attention modules, by the names that are common.
_ATTENTION = ("attn", "attention", "q_proj", "qkv", "query", "key", "c_attn", "wq")
_OF_EXPERTS = 3


@dataclass(frozen=True, kw_only=True)
class Tileable:
    """A module whose calls may run in tiles.

    Args:
        module: an MLP, experts, or a norm.
        inputs: the names of its inputs, in their order.
        is_one_of_several: whether it is one of a list of MLPs, each of which has some of the tokens.
    """

    module: nn.Module
    inputs: tuple[str, ...]
    is_one_of_several: bool = False

    @property
    def features(self) -> set[int]:
        """Those of its input; of experts without a gate their inner ones, too, for shapes do not tell these apart."""
        if _of_linear_layers(self.module):
            first: Any = next(each for each in self.module.modules() if _is_linear(each))
            return {int(first.in_features if hasattr(first, "in_features") else first.nx)}
        return _common_sides(self.module)

    @property
    def widths(self) -> int:
        """What a token leaves at least, in elements: the wider side of each weight."""
        if _of_linear_layers(self.module):
            linear: list[Any] = [each for each in self.module.modules() if _is_linear(each)]
            return sum(max(gathered_shape(each.weight)[-2:]) for each in linear)
        return sum(max(sides) for sides in _sides(self.module))


def mlps_and_norms(block: nn.Module) -> tuple[list[Tileable], list[Tileable]]:
    """Return a block's MLPs and experts, and its norms of as many features: not those of single heads, whose tokens are elsewhere."""
    block = without_compilation(block)
    mlps = list(_mlps(block))
    inside, features = {part for mlp in mlps for part in mlp.module.modules()}, _features(mlps)
    norms = [each for each in block.modules() if each not in inside and _looks_like_norm(each, features)]
    return mlps, [_of_one_input(each) for each in norms]


def norms_outside(
    root: nn.Module | None,
    blocks: Sequence[nn.Module],
    found: Iterable[tuple[list[Tileable], list[Tileable]]],
) -> list[Tileable]:
    """Return the norms outside of blocks that have the features of a block's: the last one of a language model, say."""
    inside = {part for block in blocks for part in without_compilation(block).modules()}
    features = _features(mlp for mlps, _ in found for mlp in mlps)
    others = () if root is None else root.modules()
    return [_of_one_input(each) for each in others if each not in inside and _looks_like_norm(each, features)]


def _features(mlps: Iterable[Tileable]) -> set[int]:
    return set().union(*(mlp.features for mlp in mlps))


def has_capacity(module: nn.Module) -> bool:
    """Return whether a module, or its code, names a capacity: of experts that take so many tokens and drop the others."""
    return any("capacity" in name.lower() for each in module.modules() for name in (*vars(each), *_names_in(each)))


def _names_in(module: nn.Module) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else (*code.co_names, *code.co_varnames)


def _mlps(block: nn.Module) -> Iterator[Tileable]:
    """Yield the outermost modules of a block that look like an MLP or like experts."""
    children = [*block.children()]
    several = isinstance(block, (nn.ModuleList, nn.ModuleDict)) and sum(map(_looks_like_mlp, children)) > 1
    for child in children:
        if has_capacity(child):
            yield from _mlps(child)
        elif inputs := _inputs_of_experts(child):
            yield Tileable(module=child, inputs=inputs)
        elif _looks_like_mlp(child) and not _has_several_mlps(child):
            yield Tileable(module=child, inputs=tuple(_inputs(child)), is_one_of_several=several)
        else:
            yield from _mlps(child)


def _looks_like_mlp(module: nn.Module) -> bool:
    """Return whether a module has two linear layers and more, nothing random, and one input."""
    if any(name in _ATTENTION for name, _ in module.named_children()):
        return False
    leaves = [each for each in module.modules() if not any(True for _ in each.children())]
    linear = [each for each in leaves if _is_linear(each)]
    others = [each for each in leaves if each not in linear and any(True for _ in each.parameters())]
    own = [
        each for each in module.modules() if each not in leaves and any(True for _ in each.parameters(recurse=False))
    ]
    return len(linear) > 1 and not others and not _draws(module) and not own and len(_inputs(module)) == 1


def _has_several_mlps(module: nn.Module) -> bool:
    lists = [each for each in module.modules() if isinstance(each, (nn.ModuleList, nn.ModuleDict))]
    return any(sum(map(_looks_like_mlp, each.children())) > 1 for each in lists)


def _inputs_of_experts(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's three inputs if it looks like experts that are told which tokens are whose; else none."""
    within = module
    while isinstance(inner := getattr(within, "base_layer", None), nn.Module):
        within = inner  # PEFT's, around the module of a parameter
    inputs = _inputs(within)
    if len(inputs) != _OF_EXPERTS or _draws(module) or any(name in _ATTENTION for name, _ in within.named_children()):
        return ()
    is_layer = _of_linear_layers(within)
    return tuple(inputs) if (_has_several_mlps(within) if is_layer else _common_sides(within)) else ()


def _draws(module: nn.Module) -> bool:
    return any(isinstance(each, nn.modules.dropout._DropoutNd) and each.p > 0 for each in module.modules())


def _of_linear_layers(module: nn.Module) -> bool:
    """Return whether all weights are those of linear layers."""
    linear = {part for each in module.modules() if _is_linear(each) for part in each.parameters()}
    return all(each in linear for each in module.parameters())


def _sides(module: nn.Module) -> list[tuple[int, ...]]:
    """Return the two sides of each matrix, of a stack of them of one: adapters of linear layers around a parameter have none."""
    linear = {part for each in module.modules() if _is_linear(each) for part in each.parameters()}
    biases = {part for name, part in module.named_parameters() if name.endswith("bias")}
    own = [each for each in module.parameters() if each not in linear and each not in biases]
    return [gathered_shape(each)[-2:] for each in own if each.dim() > 1]


def _common_sides(module: nn.Module) -> set[int]:
    """Return the extents that all of two and more matrices have: that of the features which come and go is one."""
    sides = _sides(module)
    return set.intersection(*map(set, sides)) if len(sides) > 1 else set()


def _looks_like_norm(module: nn.Module, features: set[int]) -> bool:
    sizes = {tuple(gathered_shape(each)) for each in module.parameters()}
    of_features = len(sizes) == 1 and sizes <= {(each,) for each in features}
    is_leaf = not any(True for _ in (*module.children(), *module.buffers()))
    named = "norm" in type(module).__name__.lower() and not isinstance(module, nn.modules.batchnorm._NormBase)
    # torch's own layer norm saves its input, in its dtype, and two numbers a token: nothing to gain.
    is_fused = type(module).forward is nn.LayerNorm.forward
    return of_features and is_leaf and named and not is_fused and len(_inputs(module)) == 1


def _of_one_input(module: nn.Module) -> Tileable:
    return Tileable(module=module, inputs=tuple(_inputs(module)))


def _is_linear(module: nn.Module) -> bool:
    # transformers' Conv1D, of GPT-2, is a linear layer whose weight is transposed.
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _inputs(module: nn.Module) -> list[str]:
    """Return the names of a module's inputs; none where some have no name."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    named = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return named if len(named) == len(parameters) else []
