"""The options of tensor parallelism: over how many ranks layers are split, and which of them how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_sp.config.checks import check_name
from lightning_sp.errors import SequenceParallelError

# Hugging Face's names. A layer's columns are its outputs, its rows its inputs:
#   colwise                           whole inputs, this rank's outputs
#   packed_colwise                    whole inputs, this rank's share of each part of the outputs: of q, of k and of v
#   rowwise                           this rank's inputs, whole outputs: the sum over the ranks
#   colwise_gather_output             whole inputs, whole outputs: gathered; of an output head a loss gathers none
#   rowwise_split_input               whole inputs, of which each rank takes its part, whole outputs
#   replicated_with_grad_allreduce    whole weights that are used on this rank's part, a norm of heads say
#   embedding_rowwise                 this rank's words of a table
TENSOR_PARALLEL_STYLES = (
    "colwise",
    "packed_colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "replicated_with_grad_allreduce",
    "embedding_rowwise",
)


def check_tensor_parallel(size: int, plan: Any, against: Mapping[str, str]) -> None:
    """Refuse a plan without a size above 1 or of other styles, and other options that do not go with it.

    Args:
        size: a positive integer.
        plan: as given.
        against: other options that were given, and why they do not go with split layers.
    """
    if plan is not None and (
        not isinstance(plan, Mapping) or not all(isinstance(each, str) for pair in plan.items() for each in pair)
    ):
        raise SequenceParallelError(
            f"tensor_parallel_plan={plan!r}: must be the names of layers with the style of each, as {{'layers.*.mlp.up_proj': 'colwise'}}"
        )
    for name, style in (plan or {}).items():
        check_name(f"tensor_parallel_plan[{name!r}]", style, TENSOR_PARALLEL_STYLES)
    if plan is not None and size == 1:
        raise SequenceParallelError(
            f"tensor_parallel_plan of {len(plan)} layers with tensor_parallel_size=1: no layer would be split; give tensor_parallel_size, or "
            "leave the plan out"
        )
    for name, why in against.items() if size > 1 else ():
        raise SequenceParallelError(
            f"{name} with tensor_parallel_size={size}: {why}; leave it out, or use tensor_parallel_size=1 with a larger "
            "sequence_parallel_size"
        )
