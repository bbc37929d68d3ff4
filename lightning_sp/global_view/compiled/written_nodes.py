"""What a node of a captured graph writes into."""

from __future__ import annotations

from torch.fx import Node
from torch.utils._pytree import tree_leaves

from lightning_sp.global_view.calls.call import writes_by_name

# What Dynamo's graphs have for `x[i] = y` and `x += y`.
_OF_OPERATOR = {
    "setitem", "__setitem__", *(f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "and", "or", "xor")),
}  # fmt: skip


def written_nodes(node: Node) -> list[Node]:
    """Return the nodes whose tensors a node writes into: its first argument's, a list of them, or those that its result is put into."""
    if node.op not in ("call_function", "call_method"):
        return []
    name = str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", ""))
    in_place = name in _OF_OPERATOR or writes_by_name(name) or node.kwargs.get("inplace")
    first = node.args[0] if node.args and in_place else None
    return [each for each in tree_leaves((first, node.kwargs.get("out"))) if isinstance(each, Node)]
