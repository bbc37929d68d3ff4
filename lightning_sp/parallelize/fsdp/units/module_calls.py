"""Whether a model calls one of its layers as a module and nothing else: read from the source of what its forward runs.

FSDP2 gathers a unit in the call of its module. A layer whose weight is used without a call can be no unit of its own:

    self.lm_head(hidden)                          a call
    F.linear(hidden, self.lm_head.weight)         none: the weight would be a shard
    self.loss(hidden, self.lm_head)               none that is seen here
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import lru_cache, partial
from types import CodeType
from typing import Any

from torch import nn

from lightning_sp.parallelize.compilation import compiled_modules

# What may be read of a layer, or of its weight, wherever it lies.
_HARMLESS = {
    "dtype", "device", "shape", "requires_grad", "in_features", "out_features", "num_embeddings", "embedding_dim", "padding_idx"
}  # fmt: skip
_PARAMETERS = {"weight", "bias"}
# Hugging Face's names for a model's own embedding and head.
_GETTERS = {"get_input_embeddings", "get_output_embeddings"}
_QUESTIONS = {"isinstance", "hasattr"}


def is_only_called(root: nn.Module, layer: nn.Module) -> bool:
    """Return whether every use of a layer in the forwards of a model is a call of it; False where that cannot be read.

    Args:
        root: the model.
        layer: one of its modules.
    """
    names: set[str] = set()
    for holder in root.modules():
        own = {name for name, child in holder._modules.items() if child is layer}
        if own and isinstance(holder, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            return False  # reached by a number
        names |= own
    if any(layer in each.modules() for each in compiled_modules(root)):
        return False
    kinds = {type(each) for each in root.modules() if not _is_torch(type(each))}
    functions = {_plain(f) for each in root.modules() if (f := vars(each).get("forward")) is not None}
    methods = functions.union(*(_run_by_forward(kind) for kind in kinds))
    codes = {getattr(method, "__code__", None) for method in methods}
    return all(isinstance(code, CodeType) and not _uses_otherwise(code, frozenset(names)) for code in codes)


def _is_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _plain(function: Any) -> Any:
    """Return what a method, a partial or a wrapped function runs."""
    while isinstance(function, partial):
        function = function.func
    return inspect.unwrap(getattr(function, "__func__", function))


def _run_by_forward(kind: type) -> set[Callable[..., Any]]:
    """Return a class' `forward`, its properties, and the methods that these call on itself, at any depth; those of its bases among them."""
    found: set[Callable[..., Any]] = set()
    own = [each for each in kind.__mro__ if not _is_torch(each)]
    seen = {"forward", *(name for each in own for name, value in vars(each).items() if isinstance(value, property))}
    names = list(seen)
    while names:
        name = names.pop()
        for each in own:
            value = vars(each).get(name)
            method = _plain(value.fget if isinstance(value, property) else value)
            if inspect.isfunction(method) and method not in found:
                found.add(method)
                new = _methods_called(method.__code__) - seen
                seen |= new
                names += new
    return found


# What source says is kept by its code: each layer asks for the same methods, and to read one takes milliseconds. By the function it would be
# kept alive with all that it closes over.
@lru_cache(maxsize=4096)
def _methods_called(code: CodeType) -> frozenset[str]:
    found = set()
    for node in ast.walk(_tree(code) or ast.Pass()):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            of_super = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super"
            if of_super or (isinstance(owner, ast.Name) and owner.id == "self"):
                found.add(node.func.attr)
    return frozenset(found)


def _tree(code: CodeType) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return None


@lru_cache(maxsize=4096)
def _uses_otherwise(code: CodeType, names: frozenset[str]) -> bool:
    """Return whether a function uses a layer of one of the names in another way than to call it, or cannot be read."""
    tree = _tree(code)
    if tree is None:
        return True
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    return any(not _is_call(node, parents) for node in ast.walk(tree) if _is_layer(node, names))


def _is_layer(node: ast.AST, names: frozenset[str]) -> bool:
    if isinstance(node, ast.Attribute) and node.attr in names:
        return isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _GETTERS


def _is_call(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    around = parents.get(node)
    if isinstance(around, ast.Call):
        asked = isinstance(around.func, ast.Name) and around.func.id in _QUESTIONS
        return around.func is node or asked
    if isinstance(around, ast.Attribute):
        further = parents.get(around)
        of_parameter = around.attr in _PARAMETERS and isinstance(further, ast.Attribute) and further.attr in _HARMLESS
        return around.attr in _HARMLESS or of_parameter
    return isinstance(around, ast.Compare) or (isinstance(around, ast.If) and around.test is node)
