"""Interception of `F.scaled_dot_product_attention`, for models that call it, directly or through torch's own modules.

Replaced: the attribute, for whatever looks it up when it runs, `nn.MultiheadAttention` in training included; and the names that the model's
own files bound to it (`rebind`). Missed: attention written out by hand; the count of calls and the preflight find it. Explicit masks are read
in `explicit_mask`. What the operator cannot carry is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sp.attention.spec.documents import document_ids
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.rewrite.attention_call import attend
from lightning_sp.rewrite.explicit_mask import explicit_mask
from lightning_sp.rewrite.rebind import BoundNames
from lightning_sp.rewrite.requested_mask import RequestedMask


class SdpaInterception(AbstractContextManager[None]):
    """Makes `F.scaled_dot_product_attention` the sequence-parallel one while the context has a step in progress, until it exits."""

    def __init__(self, context: SequenceContext, names: BoundNames) -> None:
        self.context, self._names = context, names
        self._undo = ExitStack()
        self._original: Callable[..., Tensor] | None = None
        self._fastpath = True

    def __enter__(self) -> None:
        assert self._original is None
        self._original = F.scaled_dot_product_attention
        self._fastpath = torch.backends.mha.get_fastpath_enabled()
        F.scaled_dot_product_attention = self._sdpa
        self._names.rebind_to(self._original, self._sdpa, self._undo)
        # The fused encoder path of nn.TransformerEncoder under no_grad would pass us by in validation.
        torch.backends.mha.set_fastpath_enabled(False)

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        if self._original is not None:
            F.scaled_dot_product_attention = self._original
            torch.backends.mha.set_fastpath_enabled(self._fastpath)
            self._original = None

    def _sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | RequestedMask | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        assert self._original is not None
        # In the global view tensors know themselves whether they are of the sequence.
        if self.context.global_view or self.context.leaves_alone(query.shape[-2], key.shape[-2]):
            assert not isinstance(attn_mask, RequestedMask)
            if self.context.reference is not None:
                self.context.note_reference_attention(query.shape[-2], key.shape[-2])
                # One device's own, but for the documents that the user declared. Dropout is off in both runs of a preflight.
                attn_mask, is_causal = _within_documents(self.context.reference, attn_mask, is_causal, query)
                dropout_p = 0.0
            if self.context.dropout_is_off:
                dropout_p = 0.0
            return self._original(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        assert self.context.step is not None
        if query.dim() == 3:
            # (B x H, S, D), as nn.MultiheadAttention with one head per row may call: there are no heads to exchange.
            raise SequenceParallelError(
                f"scaled_dot_product_attention on {tuple(query.shape)}: must be (batch, heads, tokens, head dim)"
            )
        if attn_mask is not None and is_causal:
            raise SequenceParallelError(
                f"scaled_dot_product_attention with attn_mask of shape {tuple(attn_mask.shape)} and is_causal=True: torch takes one of them"
            )
        queries, keys = self.context.sequences(query.shape[2], key.shape[2])
        mask, bias = self.context.step.mask(queries, keys, is_causal), None
        if isinstance(attn_mask, RequestedMask):
            mask = attn_mask.mask
        elif attn_mask is not None:
            mask, bias = explicit_mask(self.context, attn_mask, queries, keys)
        return attend(self.context, query, key, value, mask=mask, scale=scale, bias=bias, dropout_p=dropout_p)


def _within_documents(
    reference: SequenceInfo, given: Tensor | None, causal: bool, query: Tensor
) -> tuple[Tensor | None, bool]:
    """Return the mask of a short whole batch within its documents, and whether torch's function is to be causal besides.

    Shapes: given (..., S or 1, S) -> (rows, 1 or heads, S, S).
    """
    if reference.boundaries is None or query.shape[-2] != reference.length:
        return given, causal
    ids = document_ids(reference.boundaries, reference.length)
    same = ids[:, :, None] == ids[:, None, :]
    documents = (same.tril() if causal else same)[:, None].to(query.device)
    if given is None or given.dtype == torch.bool:
        return (documents if given is None else documents & given), False
    return given.masked_fill(~documents, -torch.inf), False
