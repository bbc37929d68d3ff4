"""The call of the sequence-parallel operator in place of a model's own attention: counted, and with the options of the run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lightning_sp.attention import AttentionMask, sequence_parallel_attention
from lightning_sp.attention.spec.score_mod import ScoreMod
from lightning_sp.context.masks import AttentionPattern
from lightning_sp.context.step import SequenceContext
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
    step = context.step
    assert step is not None
    # A checkpointed region may have no side effect under torch.compile; see `StepRunner._counted`.
    if not torch.compiler.is_compiling():
        step.num_attention_calls += 1
        step.attention_patterns.append(AttentionPattern.of(mask))
    run = partial(
        sequence_parallel_attention,
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


def _draw(run: Callable[..., Tensor], context: SequenceContext, probability: float) -> Tensor:
    return run(dropout=attention_dropout(context, probability))


# Never traced: the number of the call is another one in each step, and would be compiled in.
_with_dropout: Callable[..., Tensor] = torch.compiler.disable(_draw)  # type: ignore[no-untyped-call]
