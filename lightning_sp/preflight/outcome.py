"""What a step gave in a trial, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sp.context.token_outputs import Shapes
from lightning_sp.loss.added_constants import Described
from lightning_sp.preflight.recording.hidden_terms import Call, Weights
from lightning_sp.preflight.recording.logged import Number
from lightning_sp.preflight.recording.numbers_read.read_numbers import ReadNumbers
from lightning_sp.preflight.recording.token_outcomes import Other
from lightning_sp.preflight.recording.watch import AttentionCall, Draw


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a step gave, forward and backward, on this rank.

    Args:
        loss: as a mean; None where the step returned none.
        gradients: this rank's shard of each.
        buffers: after the step.
        num_sums: cross entropies of it that are sums; known of a sharded run alone.
        num_over_groups: reductions of it over all data-parallel groups; likewise.
        num_means: cross entropies of it that are means over the tokens of all groups; likewise.
        counts: what each data-parallel group's terms of each of its losses count by; likewise.
        terms: of each of its losses, what they are divided by; None where that cannot be read.
        by_counts: whether the gradients are those of groups that count so: the loss is a group's own even then; likewise.
        dtypes: floating ones that it computed in; known of a whole run alone, as the rest.
        draws: random numbers that it drew.
        attention: calls of torch's attention functions, one after the other.
        numbers: that it logs; known of a sharded run alone.
        keeps: whether it leaves tensors of tokens in lists and dicts of the module; likewise.
        shapes: of the tensors that it returns, and that it keeps there, by the way to each.
        hidden: calls that hide terms of the loss.
        read: numbers of the batch that it compares or reads.
        left: numbers that later steps may go by; known of a whole run alone.
        token_outcomes: calls that are to be shown with others; of a sharded run all that give outcomes of tokens.
    """

    loss: Tensor | None
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    num_sums: int = 0
    num_over_groups: int = 0
    num_means: int = 0
    counts: tuple[Tensor, ...] = ()
    terms: tuple[list[Described] | None, ...] = ()
    by_counts: bool = False
    dtypes: frozenset[torch.dtype] = frozenset()
    draws: tuple[Draw, ...] = ()
    attention: tuple[AttentionCall, ...] = ()
    numbers: Mapping[str, Number] = field(default_factory=dict)
    keeps: bool = False
    shapes: tuple[Shapes, Shapes] = ({}, {})
    hidden: Mapping[Call, Weights] = field(default_factory=dict)
    read: ReadNumbers = field(default_factory=ReadNumbers)
    left: Mapping[str, float] = field(default_factory=dict)
    token_outcomes: Mapping[Call, Other] = field(default_factory=dict)
