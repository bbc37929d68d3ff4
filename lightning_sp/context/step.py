"""The state of a step in progress: the mesh, the batch that was sharded, and what the rewrite and the loss counted of it.

One object per strategy, handed to every interception by argument. It is an attribute and not a thread-local, because a checkpointed
block is recomputed on autograd's own thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp.attention.spec.mask import AttentionMask
from lightning_sp.config import AttentionOptions
from lightning_sp.context.dropout import DropoutCalls
from lightning_sp.context.head_stage import HeadStage
from lightning_sp.context.masks import AttentionPattern, build_mask
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.token_outputs import TokenOutputs
from lightning_sp.context.unsharded import UnshardedModules, WholeCalls
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout
from lightning_sp.mesh import SequenceMesh


@dataclass(kw_only=True)
class Step:
    """One forward (and backward) of the user's step on a sharded batch. The interceptions count into it.

    Args:
        batch: the sharded batch.
        loss_group: ranks over which the loss is a mean in evaluation: the sequence's; None in training, where it is over `token_group`.
        token_group: ranks that together hold each token of the global batch once; None is the world.
        num_attention_calls: attention calls that reached the sequence-parallel operator.
        num_losses: intercepted losses.
        num_sums: of those, sums.
        num_summed_in_part: targets of those over a part of this rank's tokens: a loss in pieces, to save memory.
        num_reductions: reductions that were called.
        num_over_groups: of those, over the rows of all data-parallel groups.
        row_losses: of those over one target for each row, this rank's sums: equal on all ranks of a sequence, or made from a shard.
        token_counts: valid tokens of each intercepted mean, over `summed_over`, as scalar tensors.
        means: the node of autograd's graph of each of those, None outside of a graph; empty where the step says itself what its tokens are.
        requested_causal: whether the masks that a Hugging Face model asked for were causal.
        attention_patterns: of the attention calls, one after the other.
        checked_padding_masks: explicit masks, with their versions, that were found equal to the batch's padding mask.
        has_batch_masks: the Hugging Face model that began last was given the batch's own padding masks, to which nobody has written.
        dropout_calls: numbers of the attention calls with dropout.
        whole_calls: likewise of the modules that run whole on every rank.
        logs_new: whether it logs under a name that no trial has compared.
        adds_up_rows: as the context has it.
        masks: by (sequence of the queries, sequence of the keys, causal), sequences by number; built and checked once for all layers.
    """

    batch: SequenceInfo
    loss_group: ProcessGroup | None = None
    token_group: ProcessGroup | None = None
    num_attention_calls: int = 0
    num_losses: int = 0
    num_sums: int = 0
    num_summed_in_part: int = 0
    num_reductions: int = 0
    num_over_groups: int = 0
    row_losses: list[Tensor] = field(default_factory=list)
    token_counts: list[Tensor] = field(default_factory=list)
    means: list[Any] = field(default_factory=list)
    requested_causal: set[bool] = field(default_factory=set)
    attention_patterns: list[AttentionPattern] = field(default_factory=list)
    checked_padding_masks: list[tuple[Tensor, int]] = field(default_factory=list)
    has_batch_masks: bool = False
    dropout_calls: DropoutCalls = field(default_factory=DropoutCalls)
    whole_calls: WholeCalls = field(default_factory=WholeCalls)
    logs_new: bool = False
    adds_up_rows: bool = False
    masks: dict[tuple[int, int, bool], AttentionMask] = field(init=False)

    def __post_init__(self) -> None:
        self.take(self.batch)

    def take(self, batch: SequenceInfo) -> None:
        """Go on with another batch, before attention has been called: a hook has cut it, say."""
        self.batch = batch
        numbered = list(enumerate(batch.sequences))
        self.masks = {
            (i, j, causal): build_mask(queries, keys, causal=causal)
            for i, queries in numbered
            for j, keys in numbered
            for causal in (True, False)
        }

    @property
    def summed_over(self) -> ProcessGroup | None:
        """The ranks over which losses and reductions of tokens are made; None is the world."""
        return self.token_group if self.loss_group is None else self.loss_group

    def mask(self, queries: SequenceInfo, keys: SequenceInfo, causal: bool) -> AttentionMask:
        """Return the mask of an attention that has none of its own: causal or full, within the batch's documents."""
        encoder = self.batch.encoder
        return self.masks[int(queries is encoder), int(keys is encoder), causal]


class SequenceContext:
    """The state shared by the strategy, the rewrite and the loss. Inactive (step None): every interception is the original function."""

    def __init__(self, mesh: SequenceMesh, options: AttentionOptions, *, global_view: bool = False) -> None:
        # Of the step in progress: where it holds no sequence, of whole rows.
        self.mesh = mesh
        self.run_mesh = mesh
        self.options = options
        self.step: Step | None = None
        self.unsharded = UnshardedModules(self)
        self._record: Callable[[int, int], None] | None = None
        self.reference: SequenceInfo | None = None
        # On a mesh of whole sequences, which losses and reductions see, and nothing else: of a batch that holds no sequence, or of a reference
        # in which data-parallel groups stay apart.
        self.whole_step: Step | None = None
        # Whether sums of cross entropies are over all data-parallel groups; None where no trial of a step with reductions has told.
        self.sums_over_groups: bool | None = None
        # Whether a step's loss adds up its rows, so that the mean over data-parallel groups is one device's, divided by their number.
        self.adds_up_rows = False
        # Whether each group's terms of a loss count by what they are divided by, or a loss is a mean over the groups; None where no trial has
        # told. What each group's terms count by in trials, whether some have any, and whether crops of unequal counts were tried.
        self.by_counts: bool | None = None
        self.noted_counts: list[Tensor] = []
        # Likewise the terms of each loss, as `loss.added_constants` describes them; what is added to the counts that divide them (empty where
        # no other trial tells it again), with which counts that was told, and whether it was again.
        self.noted_terms, self.told_by = list[Any](), list[float]()
        self.added: Any = None
        self.has_own_terms = self.counts_tried = self.added_is_told = False
        # Of the sums that a step logs, by the step's name and theirs, whether the ranks of a sequence have one together, or each a part of it.
        self.logged_once: dict[str, dict[str, bool]] = {}
        # The names under which training_step logs in trials that compare them; None before the first.
        self.logged_names: frozenset[str] | None = None
        # Numbers that agreed in a trial, it may be by chance: each rank's own, which steps compare; reduced ones and roundings of 0.
        self.watched_numbers, self.undecided_numbers = frozenset[str](), frozenset[str]()
        # Whether training_step leaves tensors of tokens in lists and dicts of the module, for a hook at the epoch's end.
        self.keeps_in_training = False
        # Whether a hook of the user's at the batch's end reads what training_step returns.
        self.hands_outputs = False
        # Which tensors that steps return or keep have a rank's tokens.
        self.token_outputs = TokenOutputs()
        # Names of the buffers that training_step moves; None where no trial has told.
        self.moved_buffers: frozenset[str] | None = None
        # Whether the attention of a first step has been looked at.
        self.attention_told = False
        # Of the attention calls of the step before: the next batch is balanced for them.
        self.last_attention_patterns: tuple[AttentionPattern, ...] = ()
        # What gives a model back its own attention while a reference runs.
        self.in_reference: list[Callable[[], AbstractContextManager[None]]] = []
        # Called when the user's step has returned, before its backward.
        self.at_step_end: list[Callable[[], None]] = []
        # Of a module whose heads are computed in stages, the one in progress.
        self.head_stage: HeadStage | None = None
        # Whether the step sees whole sequences, in tensors that hold this rank's part.
        self.global_view = global_view
        self._of_other_view: tuple[bool | None, bool, tuple[AttentionPattern, ...]] = (None, False, ())
        # The name of the module inside of which tensors are this rank's part of a split layer's outputs; empty outside of one.
        self.inside_split_layers: Callable[[], str] = str
        # Whether output heads may give logits that are made when they are read.
        self.defers_logits = True
        self.trial_seed: int | None = None
        # Whether the last step was one of whole rows, of a batch that holds no sequence; what is called before such a step.
        self.last_is_whole = False
        self.before_whole_rows: list[Callable[[], object]] = []

    def show(self, *, whole: bool) -> None:
        """Show steps whole sequences, or this rank's part. What was learned of a model in one view is no matter of the other."""
        if whole == self.global_view:
            return
        learned = self.sums_over_groups, self.attention_told, self.last_attention_patterns
        self.sums_over_groups, self.attention_told, self.last_attention_patterns = self._of_other_view
        self._of_other_view = learned
        self.global_view = whole
        if whole:
            self.unsharded.leave()
        else:
            self.unsharded.come_back()

    def forget_sums(self) -> None:
        """Begin a fit, of whose losses no trial has told over which rows their sums are."""
        self.sums_over_groups, self.adds_up_rows, self.by_counts = None, False, None
        self.has_own_terms = self.counts_tried = self.added_is_told = False
        self.added = None

    def begin(self, step: Step) -> None:
        """Put a step in progress. Of a batch without a sequence attention and positions are the model's own: every rank has all rows."""
        self.last_is_whole = step.batch.is_whole
        if step.batch.is_whole:
            while self.before_whole_rows:
                self.before_whole_rows.pop()()
            self.whole_step, self.mesh = step, replace(self.run_mesh, layout=SequenceLayout())
        else:
            self.step = step

    def end(self) -> None:
        """Give every intercepted function back its own behaviour."""
        self.step = self.whole_step = None
        self.mesh = self.run_mesh

    @property
    def dropout_calls(self) -> DropoutCalls:
        """The numbers of the calls with dropout of the step in progress."""
        step = self.loss_step or self.unsharded.suspended_step
        assert step is not None
        calls: DropoutCalls = step.dropout_calls
        return calls

    @property
    def loss_step(self) -> Step | None:
        """The step that losses and reductions belong to."""
        return self.whole_step if self.step is None else self.step

    @property
    def local_length(self) -> int:
        """Tokens of the current batch on this rank, of the decoder's sequence where there are two."""
        assert self.step is not None
        return self.local_tokens(self.step.batch)

    def local_tokens(self, sequence: SequenceInfo) -> int:
        """Return the number of a sequence's tokens on this rank."""
        return sequence.padded_length // self.mesh.layout.size

    def sequences(self, queries: int, keys: int) -> tuple[SequenceInfo, SequenceInfo]:
        """Return the sequences that an attention's queries and keys belong to, by their numbers of tokens on this rank.

        Raises:
            SequenceParallelError: no sequence of the current batch has as many.
        """
        of_queries, of_keys = self._sequence_of_length(queries), self._sequence_of_length(keys)
        if of_queries is None or of_keys is None:
            assert self.step is not None
            batch = self.step.batch
            shard = f"{self.local_tokens(batch)} tokens"
            if batch.encoder is not None:
                shard = f"{shard} of the decoder and {self.local_tokens(batch.encoder)} of the encoder"
            raise SequenceParallelError(
                f"attention of {queries} queries over {keys} keys inside a step whose shard has {shard}: a key-value cache, whole sequences and "
                "cross attention to tokens that are not in the batch cannot be carried here; run whole sequences outside training_step and "
                "validation_step; an encoder-decoder batch names its sequences input_ids and decoder_input_ids, or so in "
                f"sequence_dims{self.untold}"
            )
        self._check_ambiguous(queries, keys)
        return of_queries, of_keys

    def leaves_alone(self, queries: int, keys: int) -> bool:
        """Return whether attention of so many queries and keys is torch's own in a step: to other tokens, where no sequence is split."""
        if self.step is None or self.mesh.layout.size > 1:
            return self.step is None
        return self._sequence_of_length(queries) is None or self._sequence_of_length(keys) is None

    @property
    def dropout_is_off(self) -> bool:
        """Whether the step in progress is tried without dropout; also in modules that run whole."""
        step = self.unsharded.suspended_step if self.step is None else self.step
        return step is not None and step.batch.dropout is not None and step.batch.dropout.off

    @property
    def untold(self) -> str:
        """What to add to a refusal where a batch holds more than its sequence, and nothing tells attention to that from the sequence's."""
        step = self.step
        known = self.unsharded.known or self.unsharded.knows_encoder or self.mesh.layout.size == 1
        if step is None or known or not step.batch.other_inputs:
            return ""
        return f"; the batch also holds {', '.join(step.batch.other_inputs)}: preflight=True finds what runs on those, and lets it run whole"

    def _check_ambiguous(self, queries: int, keys: int) -> None:
        """Refuse attention that may be to other tokens of the batch, as many as this rank has of the sequence, where nothing tells the two."""
        assert self.step is not None
        others = self.step.batch.other_inputs
        known = self.unsharded.known or self.unsharded.knows_encoder
        if others and not known and self.mesh.layout.size > 1:
            raise SequenceParallelError(
                f"attention of {queries} queries over {keys} keys inside a step whose shard has as many tokens, and whose batch also holds "
                f"{', '.join(others)}: the numbers are equal, so that it may be of the sequence or of tokens made of those; leave "
                "preflight=True, which tries two lengths, or keep them out of the batch"
            )

    def _sequence_of_length(self, tokens: int) -> SequenceInfo | None:
        assert self.step is not None
        for sequence in self.step.batch.sequences:
            if self.local_tokens(sequence) == tokens:
                return sequence
        return None

    @contextmanager
    def recorded(self, record: Callable[[int, int], None]) -> Iterator[None]:
        """Call a function with the numbers of queries and keys of each attention call of a reference run."""
        self._record = record
        try:
            yield
        finally:
            self._record = None

    @contextmanager
    def drawn_from(self, seed: int) -> Iterator[None]:
        """Draw in the global view what one device draws from a seed: a trial is compared with it."""
        self.trial_seed = seed
        try:
            yield
        finally:
            self.trial_seed = None

    @property
    def is_tried(self) -> bool:
        """Whether the step in progress is a trial's, whole or on shards: it draws by the trial's seed."""
        return self.trial_seed is not None or self.reference is not None

    @contextmanager
    def logits_made_at_once(self) -> Iterator[None]:
        """Have output heads give their logits, for what looks at each function that is called."""
        self.defers_logits = False
        try:
            yield
        finally:
            self.defers_logits = True

    def note_reference_attention(self, queries: int, keys: int) -> None:
        """Tell of an attention call of a reference run."""
        if self._record is not None:
            self._record(queries, keys)

    @contextmanager
    def inactive(self, reference: SequenceInfo | None = None) -> Iterator[None]:
        """Switch every interception off for whole sequences: generation, the preflight's reference.

        Args:
            reference: the whole batch, whose declared documents torch's own attention is to follow; None for none.
        """
        before = self.step, self.reference
        self.step, self.reference = None, reference
        try:
            with ExitStack() as own:
                for each in self.in_reference if reference is not None else ():
                    own.enter_context(each())
                yield
        finally:
            self.step, self.reference = before
