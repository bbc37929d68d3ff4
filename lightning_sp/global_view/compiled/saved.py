"""What a graph saves for its backward where blocks are recomputed.

    matmuls     the attention's operator, what ranks sent and products of matrices; the rest is computed again
    budget_50   the attention's operator, what ranks sent, and half of the bytes of what else it would: what costs the most to compute again
    selective   the attention's operator and what ranks sent
    full        its inputs alone

Told to the partitioner of forward and backward by torch's own tags, which its selective checkpoints leave on the nodes that they trace, and
by its `activation_memory_budget`: a knapsack of the operations of each result and of its bytes, at the length that is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

import torch
from torch._functorch import config as functorch
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lightning_sp.attention.operator import attention_op
from lightning_sp.comm.operators import all_gather_op, all_reduce_op, all_to_all_op
from lightning_sp.config import budget_percent
from lightning_sp.global_view.compiled.written_inputs import copy_of_written, shares_what_it_writes, writing_to_copies
from lightning_sp.weights.matmuls import is_kept

_SAVED = tuple(each._opoverload for each in (attention_op, all_reduce_op, all_gather_op, all_to_all_op))
_WRITTEN = copy_of_written._opoverload
_numbers = count()

Backend = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def recomputed(how: str) -> AbstractContextManager[Any]:
    """Tag what is traced while this is entered. Args: "matmuls", "budget_<percent>", "selective" or "full"."""
    contexts: Any = create_selective_checkpoint_contexts
    forward, _ = contexts(_POLICIES.get(how, _within_budget))
    forward.ac_graph_id = next(_numbers)
    entered: AbstractContextManager[Any] = forward
    return entered


def compiled_within(how: str, backend: str | Backend, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return a backend's code of a graph that saves for its backward what a policy allows, and nothing that it has written to.

    A graph that writes to memory which others have, too, is not compiled.

    Args:
        how: the policy; empty for what the backend chooses. All but "budget_<percent>" is told by tags alone.
        backend: the name of one of torch's, or a function.
        graph: of torch's functions.
        inputs: of the graph.
    """
    if shares_what_it_writes(graph):
        return graph  # as it is written
    found: Any = torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend
    percent = budget_percent(how)
    with nullcontext() if percent is None else functorch.patch(activation_memory_budget=percent / 100):
        made: Callable[..., Any] = found(writing_to_copies(graph), inputs)
    return made


def is_traced() -> bool:
    """Return whether a compiler traces what runs: tags of it are read. Of what it leaves to Python nobody reads any."""
    return torch._guards.TracingContext.try_get() is not None


def is_random(operator: Any) -> bool:
    """Return whether an operator draws numbers: to compute it again by the partitioner's choice would draw others."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def _within_budget(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = operator in _SAVED or operator is _WRITTEN or is_random(operator)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_SAVE


def _matmuls(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(operator, args) else _selective(context, operator)


def _selective(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = operator in _SAVED or operator is _WRITTEN
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _full(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator is _WRITTEN else CheckpointPolicy.MUST_RECOMPUTE


_POLICIES = {"matmuls": _matmuls, "selective": _selective, "full": _full}
