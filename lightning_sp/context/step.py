"""What a step in progress knows: the mesh, the batch that was sharded, and what the rewrite and the loss saw of it.

One object per strategy, handed to every interception by argument. It is an attribute and not a thread-local, because a checkpointed
block is recomputed on autograd's own thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp.attention.spec.mask import AttentionMask
from lightning_sp.context.batch import AttentionKind, BatchInfo
from lightning_sp.context.dropout import AttentionCalls
from lightning_sp.errors import SequenceParallelError
from lightning_sp.mesh import SequenceMesh


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
