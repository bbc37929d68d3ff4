"""Interception of `F.scaled_dot_product_attention`, for models that call it, directly or through torch's own modules.

Seen: whatever looks the function up as an attribute when it runs, `nn.MultiheadAttention` in training included. Missed: a name bound by
`from torch.nn.functional import scaled_dot_product_attention`, and attention written out by hand: the count of calls and the preflight
find those. What the operator cannot carry is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sp.attention import AttentionMask, sequence_parallel_attention
from lightning_sp.attention.mask import document_ids
from lightning_sp.context import BatchInfo, SequenceContext
from lightning_sp.errors import SequenceParallelError


class AttentionInterception(AbstractContextManager[None]):
    """Makes `F.scaled_dot_product_attention` the sequence-parallel one while the context has a step in progress.

    A class because it holds what it replaces until it is put back.
    """

    def __init__(self, context: SequenceContext) -> None:
        self.context = context
        self._original: Callable[..., Tensor] | None = None
        self._fastpath = True

    def __enter__(self) -> None:
        assert self._original is None
        self._original = F.scaled_dot_product_attention
        self._fastpath = torch.backends.mha.get_fastpath_enabled()
        F.scaled_dot_product_attention = self._attention
        # The fused encoder path of nn.TransformerEncoder under no_grad would pass us by in validation.
        torch.backends.mha.set_fastpath_enabled(False)

    def __exit__(self, *_: object) -> None:
        if self._original is not None:
            F.scaled_dot_product_attention = self._original
            torch.backends.mha.set_fastpath_enabled(self._fastpath)
            self._original = None

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        assert self._original is not None
        if self.context.step is None:
            if attn_mask is None and self.context.reference is not None:
                attn_mask, is_causal = _document_mask(self.context.reference, is_causal, query)
            return self._original(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if attn_mask is not None:
            raise SequenceParallelError(
                f"scaled_dot_product_attention with attn_mask of shape {tuple(attn_mask.shape)}: an explicit mask cannot be carried "
                "yet; use is_causal=True, or none, and packed documents by position_ids"
            )
        check_dropout(dropout_p)
        if query.dim() == 3:
            # (B x H, S, D), as nn.MultiheadAttention with one head per row may call: there are no heads to exchange.
            raise SequenceParallelError(
                f"scaled_dot_product_attention on {tuple(query.shape)}: must be (batch, heads, tokens, head dim)"
            )
        mask = self.context.step.masks[is_causal]
        return attend(self.context, query, key, value, mask=mask, scale=scale)


def _document_mask(reference: BatchInfo, causal: bool, query: Tensor) -> tuple[Tensor | None, bool]:
    """Return the dense mask of a short packed batch, and whether the function is to be causal by itself.

    Shapes: (rows, documents + 1) -> (rows, 1, S, S).
    """
    if reference.boundaries is None:
        return None, causal
    ids = document_ids(reference.boundaries, reference.length)
    same = ids[:, :, None] == ids[:, None, :]
    return (same.tril() if causal else same)[:, None].to(query.device), False


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
) -> Tensor:
    """Run the operator on a rewritten model's attention call, counting it.

    Shapes: query (B, H, s, D), key and value (B, K, s, D) -> (B, H, s, D).
    """
    step = context.step
    assert step is not None
    local = context.local_length
    if query.shape[2] != local or key.shape[2] != local:
        raise SequenceParallelError(
            f"attention of {query.shape[2]} queries over {key.shape[2]} keys inside a step whose shard has {local} tokens: cross attention, a "
            "key-value cache and whole sequences cannot be carried here; run whole sequences outside training_step and validation_step"
        )
    if (
        not torch.compiler.is_compiling()
    ):  # a checkpointed region may have no side effect; see SequenceParallelStrategy._counted
        step.num_attention_calls += 1
        step.kinds.append((mask.causal, mask.window_size, mask.chunk_size, mask.valid is not None))
    return sequence_parallel_attention(
        query,
        key,
        value,
        mesh=context.mesh,
        mask=mask,
        layout=step.batch.layout,
        scale=scale,
        sinks=sinks,
        softcap=softcap,
        kernel=context.kernel,
        ring_transport=context.ring_transport,
    )


def check_dropout(probability: float) -> None:
    """Refuse dropout on attention weights: its mask would depend on the degrees."""
    if probability:
        raise SequenceParallelError(
            f"attention dropout {probability}: not supported yet, its mask would depend on how the sequence is split; set the model's attention "
            "dropout to 0 (Hugging Face: config.attention_dropout=0.0, GPT-2: attn_pdrop=0.0); elementwise dropout is fine"
        )
