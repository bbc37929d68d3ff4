"""Attention dropout of a rewritten model: its masks are those of one process at all degrees, and those of the forward in a recomputation.

mask = hash(seed of the run, step and number of the call, sample of the step, head, query, key)      see `attention.dropout`
"""

from __future__ import annotations

from lightning_sp.attention.spec.dropout import AttentionDropout
from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError

# Attention calls of one step, more than any model makes.
_CALLS_BITS = 24


def attention_dropout(context: SequenceContext, probability: float) -> AttentionDropout | None:
    """Return the dropout of an attention call that is about to be made, None for none; else it takes the call's number.

    Args:
        context: its step in progress.
        probability: that a weight is dropped.

    Raises:
        SequenceParallelError: outside of a training step, or in a recomputation that does not restore the random state.
    """
    if not probability:
        return None
    assert context.step is not None
    batch = context.step.batch
    if batch.dropout is None:
        raise SequenceParallelError(
            f"attention dropout {probability} in an evaluation step: no dropout is drawn there; pass dropout_p=self.dropout if self.training "
            "else 0.0"
        )
    if batch.dropout.off:
        return None
    refuse_split_dropout(context, f"attention dropout {probability}")
    drawn, number = batch.dropout, context.dropout_calls.number()
    return AttentionDropout(probability, drawn.seed, (drawn.step << _CALLS_BITS) + number, drawn.samples)


def refuse_split_dropout(context: SequenceContext, what: str) -> None:
    """Refuse dropout between the layers that tensor parallelism splits. Equal on all ranks.

    Raises:
        SequenceParallelError: tensors are this rank's part there, and its random numbers are those of the other parts.
    """
    if (inside := context.inside_split_layers()) and not context.dropout_is_off:
        raise SequenceParallelError(
            f"{what} in {inside}, whose layers tensor_parallel_size={context.mesh.tensor_parallel_size} splits: each rank has other heads or "
            "features there, and would drop the same places of each, for ranks that split weights draw alike; set it to 0, or leave "
            f"{inside} out of tensor_parallel_plan"
        )
