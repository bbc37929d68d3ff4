"""What was whole before a batch was sharded, and the masks that its attention layers ask for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sp.attention.plan.balance import Balance
from lightning_sp.attention.spec.mask import AttentionMask
from lightning_sp.context.dropout import DropoutSource
from lightning_sp.layout import SequenceLayout

# What an attention layer asks `BatchInfo.mask` for: causal, window_size, chunk_size, hides_padding.
AttentionKind = tuple[bool, tuple[int | None, int | None], int | None, bool]


@dataclass(frozen=True, eq=False)
class BatchInfo:
    """What was whole before a batch was sharded.

    Args:
        rows: samples in the batch.
        length: tokens of each sequence as given.
        padded_length: tokens after padding to what the degrees divide.
        boundaries: documents in global positions, with the padding as a document of its own; None for one document.
        position_ids: this rank's global positions, (B, s).
        shift_labels: this rank's targets, (B, s), where the labels are known; else None.
        valid: the keys of each row that an attention mask leaves, (rows, 2); None where it hides nothing or none was given.
        mask_given: the batch has an attention mask.
        local_mask: this rank's part of it, (B, s).
        layout: which tokens each rank holds.
        balance: how that compares to zigzag; None where no documents are known, or nothing was compared.
        seen: the keys that it leaves, whole, (rows, S), bool, where they are no run; else `valid` says it.
        dropout: what attention dropout is drawn by; None in evaluation.
        encoder: of an encoder-decoder batch, whose decoder's sequence this is; None where the batch holds one sequence.
    """

    rows: int
    length: int
    padded_length: int
    boundaries: Tensor | None
    position_ids: Tensor | None
    shift_labels: Tensor | None
    valid: Tensor | None = None
    mask_given: bool = False
    local_mask: Tensor | None = None
    layout: SequenceLayout = field(default_factory=SequenceLayout)
    balance: Balance | None = None
    seen: Tensor | None = None
    dropout: DropoutSource | None = None
    encoder: BatchInfo | None = None

    @property
    def sequences(self) -> tuple[BatchInfo, ...]:
        """Return this, and the encoder's if there is one."""
        return (self,) if self.encoder is None else (self, self.encoder)

    @property
    def hides_keys(self) -> bool:
        """Whether the batch's attention mask hides a token."""
        return self.valid is not None or self.seen is not None

    def to(self, device: torch.device) -> BatchInfo:
        """Return the same with what the step reads on its device; boundaries stay on the host."""
        labels = self.shift_labels.to(device) if self.shift_labels is not None else None
        places = self.position_ids.to(device) if self.position_ids is not None else None
        local_mask = self.local_mask.to(device) if self.local_mask is not None else None
        seen = self.seen.to(device) if self.seen is not None else None
        drawn = self.dropout
        drawn = replace(drawn, samples=drawn.samples.to(device)) if drawn is not None else None
        read = self.encoder.to(device) if self.encoder is not None else None
        return replace(
            self,
            position_ids=places,
            shift_labels=labels,
            local_mask=local_mask,
            seen=seen,
            dropout=drawn,
            encoder=read,
        )

    def mask(
        self,
        causal: bool,
        window_size: tuple[int | None, int | None] = (None, None),
        chunk_size: int | None = None,
        *,
        hides_padding: bool = False,
        keys: BatchInfo | None = None,
    ) -> AttentionMask:
        """Return the attention's mask: within documents, our own padding apart, and the rest as the model asks.

        Args:
            causal: as `AttentionMask`'s.
            window_size: likewise.
            chunk_size: likewise.
            hides_padding: the model hides what the batch's attention mask hides.
            keys: in cross attention the other sequence, that the keys are of.
        """
        keys = self if keys is None else keys
        valid, seen = (keys.valid, keys.seen) if hides_padding else (None, None)
        if seen is not None and keys.padded_length > keys.length:
            seen = F.pad(seen, (0, keys.padded_length - keys.length))
        dense = None if seen is None else seen[:, None, None]
        if keys is not self:
            if valid is None and seen is None and keys.padded_length > keys.length:
                valid = torch.tensor([[0, keys.length]])
            return AttentionMask(causal, None, window_size, chunk_size, valid, dense=dense)
        boundaries = self.boundaries
        if boundaries is None and self.padded_length > self.length and not causal:
            # Causal queries never see the padding behind them; full ones would.
            boundaries = torch.tensor([[0, self.length, self.padded_length]])
        return AttentionMask(causal, boundaries, window_size, chunk_size, valid, dense=dense)
