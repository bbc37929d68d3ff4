"""Attention of tensors that show whole sequences: the operator on what the ranks hold, with masks and biases that are whole."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from lightning_sp import comm
from lightning_sp.context.masks import build_mask
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.masks.bands import band_of
from lightning_sp.global_view.rules.attention.written_attention import HIDDEN_BELOW
from lightning_sp.global_view.tensors.placement import Placement
from lightning_sp.rewrite.attention_call import attend

# Scores that low numbers are added to are lost in rounding, with their log-sum-exp, by which the operator's backward goes.
_NO_KEY = (
    "global_view: numbers that are added, and hide all keys of a query: one device weighs them alike, the operator cannot; give each query a "
    "key, as right padding does, or a mask of booleans, which gives such a query zeros"
)


@dataclass(frozen=True)
class WholeAttention:
    """Attends in the step in progress of a context."""

    context: SequenceContext

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        queries: Placement,
        keys: Placement,
        visible: Tensor | None = None,
        bias: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        documents: bool = False,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the attention's output.

        Args:
            query: local.
            key: local.
            value: local.
            queries: where the queries' sequence is.
            keys: likewise the keys'.
            visible: which keys each query sees, whole; None for all.
            bias: added to the scores, whole.
            scale: of the scores; None for 1 / sqrt(D).
            softcap: c of c tanh(score / c); None for none.
            dropout: the probability.
            causal: later keys are hidden.
            documents: keys of other documents than the query's are, where the user has declared documents: torch's own function keeps to them,
                what a model writes out does as it is written.
            sinks: a score of each head for a key without a value, (H,); None for none.

        Shapes: query (B, H, s, D), key and value (B, K, t, D), visible and bias (B or 1, H or 1, S or 1, T) -> (B, H, s, D).
        """
        for each in (queries, keys):
            _refuse_documents(each, is_torchs_own=documents)
        of_queries = _shown(queries, documents)
        alike = queries.storage is keys.storage and queries.length == keys.length
        of_keys = of_queries if alike else _shown(keys, documents)
        window: tuple[int | None, int | None] = (None, None)
        is_added = bias is not None and not comm.is_traced(bias)
        if alike:
            visible, causal, window = _known_band(visible, causal, window)
            bias, causal, window = _known_band(bias, causal, window)
        if is_added:  # all ask: what is a band here, and adds nothing, may be none in other data-parallel groups
            queries.storage.agree(_NO_KEY if _hides_all_keys(bias) else None)
        mask = build_mask(of_queries, of_keys, causal=causal, window_size=window)
        if visible is not None:
            mask = replace(mask, dense=_padded(visible, of_queries, of_keys, True))
        bias = None if bias is None else _padded(bias, of_queries, of_keys, 0.0)
        return attend(
            self.context, query, key, value, mask=mask, scale=scale, sinks=sinks, softcap=softcap, bias=bias, dropout_p=dropout
        )  # fmt: skip


def _hides_all_keys(bias: Tensor | None) -> bool:
    return bias is not None and bool((bias.detach() <= HIDDEN_BELOW).all(-1).any())


def _shown(placement: Placement, documents: bool) -> SequenceInfo:
    """Return what is known of a sequence, of the tokens that are shown."""
    sequence = placement.storage.sequence
    if documents and placement.length == sequence.length:
        return sequence
    return replace(sequence, length=placement.length, boundaries=None)


def _refuse_documents(placement: Placement, *, is_torchs_own: bool) -> None:
    """Refuse declared documents that are not kept to: all ranks come here alike."""
    whole = (placement.storage.root or placement.storage).sequence
    if whole.documents_declared and not is_torchs_own:
        raise SequenceParallelError(
            "packed documents with attention that is written out: it attends as it is written, to other documents of the row, too; use "
            "F.scaled_dot_product_attention, which keeps to the documents that you have declared, or one document a row; "
            "packed_documents=False attends to the whole row"
        )
    if whole.documents_declared and whole.positions_given and placement.length != whole.length:
        raise SequenceParallelError(
            f"packed documents with F.scaled_dot_product_attention of {placement.length} tokens, the batch's sequence has {whole.length}: which "
            "document each of them is of is not known; attend to the whole sequence and slice what comes out, or pass "
            "packed_documents=False and the mask yourself"
        )


def _known_band(
    mask: Tensor | None, causal: bool, window: tuple[int | None, int | None]
) -> tuple[Tensor | None, bool, tuple[int | None, int | None]]:
    """Return what is left of a mask or bias whose band is known, and the band with that which was known before."""
    band = band_of(mask)
    if band is None or (window != (None, None) and band.window != (None, None)):
        return mask, causal, window
    return band.keys, causal or band.after == 0, window if band.window == (None, None) else band.window


def _padded(mask: Tensor, queries: SequenceInfo, keys: SequenceInfo, value: float | bool) -> Tensor:
    """Return a whole mask or bias at the padded length: what padding gives is thrown away, and its keys are hidden by the plain mask."""
    below = queries.padded_length - mask.shape[-2] if mask.shape[-2] > 1 else 0
    beside = keys.padded_length - mask.shape[-1] if mask.shape[-1] > 1 else 0
    return F.pad(mask, (0, beside, 0, below), value=value) if below or beside else mask
