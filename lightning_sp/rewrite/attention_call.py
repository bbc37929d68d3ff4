"""The call of the sequence-parallel operator in place of a model's own attention: counted, and with the options of the run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.attention import AttentionMask, sequence_parallel_attention
from lightning_sp.attention.sequence_parallel import attention_by
from lightning_sp.attention.spec.score_mod import ScoreMod
from lightning_sp.context.masks import AttentionPattern
from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.rewrite.dropout import attention_dropout


def attend(
    context: SequenceContext,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: AttentionMask,
    scale: float | None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Run the operator on a rewritten model's attention call, counting it.

    Shapes: query (B, H, s, D), key and value (B, K, t, D) -> (B, H, s, D), s and t of `SequenceContext.sequences`.
    """
    step, stage = context.step, context.head_stage
    assert step is not None
    # A checkpointed region may have no side effect under torch.compile; see `StepRunner._counted`.
    if not torch.compiler.is_compiling() and (stage is None or stage.is_first):
        step.num_attention_calls += 1
        step.attention_patterns.append(AttentionPattern.of(mask))
        if not (context.attention_told or context.unsharded.known or context.global_view):
            _check_own_tokens(context, query, key)
    operator = sequence_parallel_attention
    if stage is not None:
        _check_stage(bias=bias, sinks=sinks, mask=mask, dropout_p=dropout_p)
        operator = partial(attention_by, stage.operator)
    run = partial(
        operator,
        query,
        key,
        value,
        mesh=context.mesh,
        mask=mask,
        layout=step.batch.layout,
        scale=scale,
        sinks=sinks,
        softcap=softcap,
        bias=bias,
        score_mod=score_mod,
        **context.options.keywords(),
    )
    return _with_dropout(run, context, dropout_p) if dropout_p else run()


def _check_stage(*, bias: Tensor | None, sinks: Tensor | None, mask: AttentionMask, dropout_p: float) -> None:
    """Refuse, in attention to a stage of a module's heads, what is given for each of all heads, or learns. Equal on all ranks."""
    given = {
        "a bias that is learned": bias is not None and bias.requires_grad,
        "a bias for each head": bias is not None and bias.shape[1] > 1,
        "sinks": sinks is not None,
        "a mask for each head": mask.dense is not None and mask.dense.shape[1] > 1,
        "dropout": bool(dropout_p),
    }
    if found := [name for name, there in given.items() if there]:
        raise SequenceParallelError(
            f"stage_inputs='recomputed' in attention with {', '.join(found)}: a stage has some of the heads alone, and numbers them from 0; use "
            "stage_inputs='saved'"
        )


def _check_own_tokens(context: SequenceContext, query: Tensor, key: Tensor) -> None:
    """Refuse attention from or to what is the same on all ranks of a sequence, and so holds no tokens of it. In a first step without preflight.

    Communicates: two all_reduces of 16 bytes over the ranks of the sequence.

    Raises:
        SequenceParallelError: on all of these ranks.
    """
    size, group = context.mesh.layout.size, context.mesh.sequence_group
    if size == 1:
        return
    alike = " and ".join(name for name, x in (("queries", query), ("keys", key)) if bool(comm.are_alike(x, group)))
    if alike:
        raise SequenceParallelError(
            f"attention of {query.shape[2]} queries over {key.shape[2]} keys: the {alike} are the same numbers on all {size} ranks that "
            "share a sequence, so they are no tokens of it but an array of the model's own (latents, learned queries or keys), of as many "
            f"as this rank has of the sequence, {context.local_length}. Without the preflight they would be taken for its tokens; "
            "preflight=True tries two lengths, which tell the two apart"
        )


def _draw(run: Callable[..., Tensor], context: SequenceContext, probability: float) -> Tensor:
    return run(dropout=attention_dropout(context, probability))


# Never traced: the number of the call is another one in each step, and would be compiled in.
_with_dropout: Callable[..., Tensor] = torch.compiler.disable(_draw)  # type: ignore[no-untyped-call]
