"""A graph that writes to its inputs, a block's counter or statistics, writes to copies of them, which go into them at its end.

    n += 1; y = x * n           as Dynamo captured it
    m = copy(n); m += 1; y = x * m; n.copy_(m)

torch's partitioner saves inputs for the backward as what costs nothing, and computes `n + 1` again from one that has been written to: another
gradient, without a word (torch 2.13, "aot_eager" and "inductor"). The copy is saved in its place: it is an operator that no pass takes out,
and marked as one that is not computed again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from lightning_sp.global_view.compiled.written_nodes import written_nodes
from lightning_sp.global_view.tensors.sequence_tensor import GlobalTensor


@torch.library.custom_op("lightning_sp::copy_of_written", mutates_args=())
def copy_of_written(tensor: Tensor) -> Tensor:
    """Return a copy. Shapes: any, the same."""
    return tensor.clone()


@copy_of_written.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


def writing_to_copies(graph: GraphModule) -> GraphModule:
    """Return a graph that does the same, and whose backward reads nothing that it has written to.

    Args:
        graph: of torch's functions, as Dynamo captured it. It is changed.
    """
    written = written_inputs(graph)
    if not written:
        return graph
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    output = next(node for node in graph.graph.nodes if node.op == "output")
    for node in written:
        with graph.graph.inserting_after(last):
            copy = graph.graph.call_function(torch.ops.lightning_sp.copy_of_written.default, (node,))
        copy.meta = {**node.meta, "recompute": CheckpointPolicy.MUST_SAVE}
        for user in [each for each in node.users if each not in (copy, output)]:
            user.replace_input_with(node, copy)
        with graph.graph.inserting_before(output):
            graph.graph.call_method("copy_", (node, copy))
    graph.recompile()
    return graph


def written_inputs(graph: GraphModule) -> list[Node]:
    """Return the inputs of a graph that it writes to, itself or through a view; but those with a gradient, which autograd minds. Pure."""
    inner = [each for each in graph.modules() if isinstance(each, GraphModule)]
    written = {_storage(node) for each in inner for one in each.graph.nodes for node in written_nodes(one)} - {None}
    found = [node for node in graph.graph.nodes if node.op == "placeholder" and _storage(node) in written]
    return [node for node in found if not node.meta["example_value"].requires_grad]


def shares_what_it_writes(graph: GraphModule) -> bool:
    """Return whether memory that a graph writes to is another input's or output's, too, or a part of more: no copy stands for it then. Pure."""
    written = written_inputs(graph)
    storages = [_storage(node) for node in graph.graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.graph.nodes if node.op == "output")
    given = [_storage(node) for node in output.all_input_nodes if node not in written]
    return any(
        storages.count(_storage(node)) > 1 or _storage(node) in given or _is_part(node.meta["example_value"])
        for node in written
    )


def _is_part(tensor: Tensor) -> bool:
    return tensor._is_view() or tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def _storage(node: Node) -> int | None:
    value = node.meta.get("example_value")
    if isinstance(value, Tensor) and not isinstance(value, GlobalTensor):
        return int(value.untyped_storage()._cdata)
    return None
