"""What a node of a captured graph writes into."""

from __future__ import annotations

from typing import Any

from torch.fx import Node
from torch.utils._pytree import tree_leaves

from lightning_sp.global_view.calls.call import writes_by_name

# What Dynamo's graphs have for `x[i] = y` and `x += y`.
_OF_OPERATOR = {
    "setitem", "__setitem__", *(f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "and", "or", "xor")),
}  # fmt: skip
# Functions that write to the second and third that they are given, and do not say so by their name.
_OF_STATISTICS, _STATISTICS = ("batch_norm", "instance_norm"), ("running_mean", "running_var")


def written_nodes(node: Node) -> list[Node]:
    """Return the nodes whose tensors a node writes into: its first argument's, a list of them, or those that its result is put into."""
    if node.op not in ("call_function", "call_method"):
        return []
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return _by_schema(node, schema)
    name = str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", ""))
    if name in _OF_STATISTICS:
        return [each for each in (*node.args[1:3], *map(node.kwargs.get, _STATISTICS)) if isinstance(each, Node)]
    in_place = name in _OF_OPERATOR or writes_by_name(name) or node.kwargs.get("inplace")
    first = node.args[0] if node.args and in_place else None
    return [each for each in tree_leaves((first, node.kwargs.get("out"))) if isinstance(each, Node)]


def _by_schema(node: Node, schema: Any) -> list[Node]:
    """Return what an operator writes to, as it says itself."""
    names = [each.name for each in schema.arguments]
    values = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    written = [each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    return [each for each in tree_leaves([values.get(name) for name in written]) if isinstance(each, Node)]
