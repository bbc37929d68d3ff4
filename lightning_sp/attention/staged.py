"""The attention of all heads in stages: q, k and v of a stage are made and exchanged when its turn comes, and again in the backward.

    forward     stage 0:  q, k, v -> exchange -> kernel -> out        of all stages stay: out and lse
                stage 1:  q, k, v -> exchange -> kernel -> out
    backward    stage 0:  q, k, v -> exchange -> dq, dk, dv -> exchange home
                stage 1:  q, k, v -> exchange -> dq, dk, dv -> exchange home

What makes a stage's q, k and v is the caller's affair. No kernel runs twice in it: its out and lse are there.

Communicates: of each stage what `operator.attention_op` and its backward do for the stage's heads, and in the backward its q, k and v once
more; see `schemes.ulysses`. The ring's keys travel as ever.
Source: Untied Ulysses (UPipe), arXiv:2602.21196.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sp.attention.fakes import Outputs
from lightning_sp.attention.operator import attention_backward_op, attention_op, gradients_home
from lightning_sp.attention.schemes.stages import empty_exchanged, exchange_qkv
from lightning_sp.attention.schemes.ulysses import Ulysses
from lightning_sp.attention.spec.codec import AttentionSpec, encode


class StageInputs(NamedTuple):
    """What a stage attends with. Shapes: q (B, h, s, D), k and v (B, k, s, D), of this rank's tokens and the stage's heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec


class StageOutputs(NamedTuple):
    """What stays of all stages for the backward.

    Args:
        out: of this rank's tokens, (B, H, s, D) over token-major memory, the stages' heads one after the other.
        lse: (stages, B, heads of this Ulysses rank in a stage, S).
        visible: of each stage the map of the blocks of which something is visible, (stages, ...).
    """

    out: Tensor
    lse: Tensor
    visible: Tensor


_numbers = itertools.count(1)
# Operators take numbers: of what makes the stages of a call in progress.
_stages: dict[int, Callable[[], Iterator[StageInputs]]] = {}


def staged_attention(x: Tensor, num_stages: int, stages: Callable[[], Iterator[StageInputs]]) -> StageOutputs:
    """Attend stage by stage, without a graph: one operator, so that a selective checkpoint policy can save all that it returns.

    Args:
        x: what the stages are made from; its device alone is read.
        num_stages: how many there are.
        stages: makes them, each when it is asked for.
    """
    number = next(_numbers)
    _stages[number] = stages
    try:
        return StageOutputs(*staged_attention_op(x, num_stages, number))
    finally:
        del _stages[number]


@torch.library.custom_op("lightning_sp::staged_attention", mutates_args=())
def staged_attention_op(x: Tensor, num_stages: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return `StageOutputs` of the stages with a number."""
    out, lse, visible = x.new_empty(0), list[Tensor](), list[Tensor]()
    for stage, (q, k, v, spec) in enumerate(_stages[number]()):
        made = Outputs(*attention_op(q, k, v, *encode(spec)))
        if not stage:
            batch, heads, tokens, dim = q.shape
            out = q.new_empty(batch, tokens, heads * num_stages, dim).transpose(1, 2)
        out[:, stage_heads(out, stage, num_stages)] = made.out
        lse.append(made.lse)
        visible.append(made.visible)
        del q, k, v, made  # before the next stage is made
    return out, torch.stack(lse), torch.stack(visible)


# What a checkpoint policy that recomputes all but the attention saves.
SAVED_OPERATORS = (torch.ops.lightning_sp.attention.default, torch.ops.lightning_sp.staged_attention.default)


def stage_heads(of_all: Tensor, stage: int, num_stages: int) -> slice:
    """Return the query heads of a stage. Shapes: (B, H, s, D)."""
    heads = of_all.shape[1] // num_stages
    return slice(stage * heads, (stage + 1) * heads)


@dataclass(frozen=True, kw_only=True)
class ExchangedStage:
    """A stage whose q, k and v have been exchanged again, for its backward."""

    saved: list[Tensor]
    num_heads: int
    num_kv_heads: int
    spec: AttentionSpec

    @classmethod
    def of(cls, given: StageInputs) -> ExchangedStage:
        """Exchange a stage. Communicates: one all_to_all_single (Ulysses)."""
        q, k, v, spec = given
        ulysses = Ulysses.of(spec.ulysses_group, q.shape[1], k.shape[1], 1)
        saved = empty_exchanged(q, k, ulysses)
        for _ in exchange_qkv(q, k, v, ulysses, saved):
            pass  # it has arrived in what is saved
        return cls(saved=saved or [q, k, v], num_heads=q.shape[1], num_kv_heads=k.shape[1], spec=spec)

    def gradients(self, out: Tensor, lse: Tensor, visible: Tensor, grad: Tensor) -> list[Tensor]:
        """Return dq, dk, dv; what was exchanged is given up.

        Shapes: out and grad (B, h, s, D), lse and visible as a stage's of `StageOutputs` -> those of `StageInputs`.
        Communicates: as the operator's backward.
        """
        code, heads = encode(self.spec), (self.num_heads, self.num_kv_heads)
        no_saved_kv = grad.new_empty(0)
        made, _ = attention_backward_op(grad, self.saved, no_saved_kv, visible, out, lse, *heads, False, *code)
        self.saved.clear()
        return gradients_home(made, *heads, self.spec.ulysses_group, 1)
