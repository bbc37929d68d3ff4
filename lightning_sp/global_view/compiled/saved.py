"""What a graph saves for its backward where blocks are recomputed.

    matmuls     the attention's operator, what ranks sent and products of matrices; the rest is computed again
    selective   the attention's operator and what ranks sent
    full        its inputs alone

Told to the partitioner of forward and backward by torch's own tags, which its selective checkpoints leave on the nodes that they trace.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import count
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lightning_sp.attention.operator import attention_op
from lightning_sp.comm.operators import all_gather_op, all_reduce_op, all_to_all_op
from lightning_sp.weights.matmuls import is_kept

_SAVED = tuple(each._opoverload for each in (attention_op, all_reduce_op, all_gather_op, all_to_all_op))
_numbers = count()


def recomputed(how: str) -> AbstractContextManager[Any]:
    """Tag what is traced while this is entered. Args: "matmuls", "selective" or "full"."""
    contexts: Any = create_selective_checkpoint_contexts
    forward, _ = contexts(_POLICIES[how])
    forward.ac_graph_id = next(_numbers)
    entered: AbstractContextManager[Any] = forward
    return entered


def _matmuls(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(operator, args) else _selective(context, operator)


def _selective(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def _full(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


_POLICIES = {"matmuls": _matmuls, "selective": _selective, "full": _full}
