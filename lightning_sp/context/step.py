"""What a step in progress knows: the mesh, the batch that was sharded, and what the rewrite and the loss saw of it.

One object per strategy, handed to every interception by argument. It is an attribute and not a thread-local, because a checkpointed
block is recomputed on autograd's own thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp.attention.plan.balance import Balance
from lightning_sp.attention.spec.mask import AttentionMask
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout
from lightning_sp.mesh import SequenceMesh

# What an attention layer asks `BatchInfo.mask` for: causal, window_size, chunk_size, hides_padding.
AttentionKind = tuple[bool, tuple[int | None, int | None], int | None, bool]


@dataclass(frozen=True, eq=False)
class DropoutSource:
    """What the attention dropout of a micro-batch is drawn by, besides the number of the call: equal at all degrees.

    Args:
        seed: of the run, the same on all ranks.
        step: optimizer steps done.
        samples: number of each row among the samples of the optimizer step, (B,), int64.
    """

    seed: int
    step: int
    samples: Tensor


class AttentionCalls:
    """Numbers the attention calls of a step that draw dropout: a recomputed call has its forward's. A class because it counts.

    A call is known by one draw from the CPU's random stream, which checkpoints restore before they recompute. The draws differ between
    ranks, the numbers do not.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def number(self) -> int:
        """Return the number of the call that is about to be made.

        Raises:
            SequenceParallelError: it is recomputed with another random state than its forward's.
        """
        # On the CPU: no device waits.
        drawn = int(torch.randint(2**62, (), device="cpu"))
        # torch.utils.checkpoint knows by the same number that it is in a backward; there is no public name.
        if drawn not in self._numbers and torch._C._current_graph_task_id() != -1:
            raise SequenceParallelError(
                f"attention with dropout is recomputed in the backward, after {len(self._numbers)} calls in the forward, and the random state "
                "is not the forward's: other weights would be dropped than in the forward; leave preserve_rng_state=True in "
                "torch.utils.checkpoint.checkpoint"
            )
        return self._numbers.setdefault(drawn, len(self._numbers))


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


@dataclass
class Step:
    """One forward (and backward) of the user's step on a sharded batch; a class because the interceptions count into it.

    Args:
        batch: the sharded batch.
        loss_group: ranks over which the loss is a mean: the world (None) in training, the sequence's ranks in evaluation.
        num_attention_calls: attention calls that reached the sequence-parallel operator.
        num_losses: intercepted losses.
        num_row_means: of those, means over the world of as many tokens as one row has, where data-parallel groups hold other rows.
        token_counts: valid tokens of each intercepted mean, over `loss_group`, as scalar tensors.
        causal_masks: what Hugging Face's mask function was asked for.
        kinds: of the attention calls, one after the other.
        padding_masks: explicit masks, and their versions, that are known to be the batch's attention mask.
        calls: numbers of the attention calls with dropout.
        masks: the attention's, by which of the batch's sequences queries and keys are of and whether it is causal; checked once for all layers.
    """

    batch: BatchInfo
    loss_group: ProcessGroup | None = None
    num_attention_calls: int = 0
    num_losses: int = 0
    num_row_means: int = 0
    token_counts: list[Tensor] = field(default_factory=list)
    causal_masks: set[bool] = field(default_factory=set)
    kinds: list[AttentionKind] = field(default_factory=list)
    padding_masks: list[tuple[Tensor, int]] = field(default_factory=list)
    calls: AttentionCalls = field(default_factory=AttentionCalls)
    masks: dict[tuple[int, int, bool], AttentionMask] = field(init=False)

    def __post_init__(self) -> None:
        both = list(enumerate(self.batch.sequences))
        self.masks = {
            (i, j, causal): queries.mask(causal, keys=keys)
            for i, queries in both
            for j, keys in both
            for causal in (True, False)
        }

    def mask(self, queries: BatchInfo, keys: BatchInfo, causal: bool) -> AttentionMask:
        """Return the mask of an attention without one of its own; all but causal or full is of the batch."""
        encoder = self.batch.encoder
        return self.masks[int(queries is encoder), int(keys is encoder), causal]


class SequenceContext:
    """The state shared by the strategy, the rewrite and the loss. Inactive (step None): every interception is the original function."""

    def __init__(
        self, mesh: SequenceMesh, kernel: str, ring_transport: str = "auto", ring_method: str = "auto"
    ) -> None:
        self.mesh = mesh
        self.kernel = kernel
        self.ring_transport = ring_transport
        self.ring_method = ring_method
        self.step: Step | None = None
        self.reference: BatchInfo | None = None
        # What the layers of the step before were; the next batch is balanced for it.
        self.kinds: tuple[AttentionKind, ...] = ()
        self._reference_calls = AttentionCalls()

    @property
    def calls(self) -> AttentionCalls:
        """Return the numbers of the attention calls of the step in progress, or of the whole run that it is compared with."""
        return self._reference_calls if self.step is None else self.step.calls

    @property
    def local_length(self) -> int:
        """Return this rank's tokens of the current batch, of a decoder's where it holds two sequences."""
        assert self.step is not None
        return self.tokens_of(self.step.batch)

    def tokens_of(self, sequence: BatchInfo) -> int:
        """Return this rank's tokens of a sequence."""
        return sequence.padded_length // self.mesh.layout.size

    def sequences(self, queries: int, keys: int) -> tuple[BatchInfo, BatchInfo]:
        """Return the sequences of the current batch that an attention's queries and keys are of, by how many this rank holds.

        Raises:
            SequenceParallelError: it holds as many of neither.
        """
        own, other = self._held(queries), self._held(keys)
        if own is None or other is None:
            assert self.step is not None
            batch = self.step.batch
            shard = f"{self.tokens_of(batch)} tokens"
            if batch.encoder is not None:
                shard = f"{shard} of the decoder and {self.tokens_of(batch.encoder)} of the encoder"
            raise SequenceParallelError(
                f"attention of {queries} queries over {keys} keys inside a step whose shard has {shard}: a key-value cache, whole sequences and "
                "cross attention to what is no sequence of the batch cannot be carried here; run whole sequences outside training_step and "
                "validation_step; an encoder-decoder batch names its sequences input_ids and decoder_input_ids, or so in sequence_dims"
            )
        return own, other

    def _held(self, tokens: int) -> BatchInfo | None:
        assert self.step is not None
        for sequence in self.step.batch.sequences:
            if self.tokens_of(sequence) == tokens:
                return sequence
        return None

    @contextmanager
    def inactive(self, reference: BatchInfo | None = None) -> Iterator[None]:
        """Switch every interception off for whole sequences: generation, the preflight's reference.

        Args:
            reference: what a whole batch holds that attention is to keep to, its documents and positions; torch's own functions do it.
        """
        before = self.step, self.reference
        self.step, self.reference, self._reference_calls = None, reference, AttentionCalls()
        try:
            yield
        finally:
            self.step, self.reference = before
