"""The class that FSDP2 gives a unit: a user's code finds its own class there, by its name and where classes are compared or looked up.

    type(block).__name__ == "Block", type(block) == Block, type(block) in (Block, Head), {Block: 0.1}[type(block)]

An object with FSDP2's methods is of a class of its own: `type(block) is Block` is False, `isinstance(block, Block)` is True. A warning names
the lines that ask so.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fully_shard import cls_to_fsdp_cls

from lightning_sp.errors import SequenceParallelError
from lightning_sp.users_code.ownership import is_file_of_user

# The attribute of such a class with the user's own.
_STANDS_FOR = "_lightning_sp_stands_for"


def stand_for(kind: type) -> None:
    """Have FSDP2 give modules of a class one that stands for it, in place of one that is called FSDP and so on.

    Args:
        kind: of a module that is about to be sharded.

    Raises:
        SequenceParallelError: it has a method by a name of FSDP2's, which would be called in its place.
    """
    if issubclass(kind, FSDPModule) or kind in cls_to_fsdp_cls:
        return
    if hidden := [name for name in vars(FSDPModule) if not name.startswith("_") and hasattr(kind, name)]:
        raise SequenceParallelError(
            f"{kind.__name__}.{hidden[0]}: FSDP2 gives a sharded module a method of that name, which would be called in place of yours; call "
            "yours by another name"
        )
    names = {"__eq__": _equals, "__hash__": _hash}
    meta: Any = type(type(kind).__name__, (type(kind),), names)
    names_of_class = {"__module__": FSDPModule.__module__, _STANDS_FOR: kind}
    cls_to_fsdp_cls[kind] = meta(kind.__name__, (FSDPModule, kind), names_of_class)


def _equals(kind: type, other: object) -> Any:
    # A class derived of it, parametrized say, stands for none.
    return True if kind is other or vars(kind).get(_STANDS_FOR) is other else NotImplemented


def _hash(kind: type) -> int:
    return type.__hash__(vars(kind).get(_STANDS_FOR, kind))


def tell_identities(root: nn.Module) -> None:
    """Warn of lines of the user's that ask by `is` for the class of a sharded module.

    Args:
        root: the sharded model.
    """
    if found := _identities(root):
        rank_zero_warn(
            f"sequence_parallel: {'; '.join(found[:3])}: a sharded module is of a class that is equal to the one that is asked for, and has its "
            "name, but is another object, so that `is` passes it over: write ==, or isinstance"
        )


def _identities(root: nn.Module) -> list[str]:
    """Return the lines, in the files of a sharded model's classes, that ask by `is` for the class of a unit.

    What initializes weights is left out: it runs before they are sharded.
    """
    kinds = {kind for each in root.modules() if (kind := vars(type(each)).get(_STANDS_FOR)) is not None}
    names = dict.fromkeys(kind.__module__ for each in root.modules() for kind in type(each).__mro__)
    files = [sys.modules[name] for name in names if is_file_of_user(name) and name in sys.modules]
    return [line for each in files for line in _identities_in(each, kinds)]


def _identities_in(module: ModuleType, kinds: Collection[type]) -> Iterator[str]:
    file = getattr(module, "__file__", None) or ""
    lines = linecache.getlines(file)
    with suppress(SyntaxError):
        for node in _nodes_in_runs(ast.parse("".join(lines))):
            if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], (ast.Is, ast.IsNot)):
                continue
            sides = node.left, node.comparators[0]
            if any(map(_asks_class, sides)) and any(_value(each, module) is kind for each in sides for kind in kinds):
                yield f"{file}:{node.lineno}: {lines[node.lineno - 1].strip()}"


def _nodes_in_runs(node: ast.AST) -> Iterator[ast.AST]:
    for each in ast.iter_child_nodes(node):
        if not (isinstance(each, ast.FunctionDef) and ("init" in each.name or each.name == "reset_parameters")):
            yield each
            yield from _nodes_in_runs(each)


def _asks_class(side: ast.expr) -> bool:
    """Return whether an expression is `type(x)` or `x.__class__`."""
    if isinstance(side, ast.Call):
        return isinstance(side.func, ast.Name) and side.func.id == "type" and len(side.args) == 1
    return isinstance(side, ast.Attribute) and side.attr == "__class__"


def _value(side: ast.expr, module: ModuleType) -> Any:
    """Return what a name of a file stands for, `Block` or `nn.Linear`; None for any other expression."""
    if isinstance(side, ast.Name):
        return vars(module).get(side.id)
    return getattr(_value(side.value, module), side.attr, None) if isinstance(side, ast.Attribute) else None
