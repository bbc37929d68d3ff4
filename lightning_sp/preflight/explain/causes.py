"""What breaks a sequence that is split over ranks: a catalogue of causes, known by the function that first gives another result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_sp.preflight.explain.remedies import LABELS, LENGTH, ONE_TOKEN, ROWS, of_function
from lightning_sp.preflight.recording.trace import Event

# The two lines follow from the function that was called.
_OF_FUNCTION = "of its function"


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause, and what removes it.

    Args:
        what: in words; a name of the call follows.
        fix: likewise.
        functions: those of torch that do it, by name.
        kinds: module classes that do it, by a part of their names.
        code: two lines that make it exact; empty where it is no matter of two lines.
    """

    what: str
    fix: str
    functions: frozenset[str] = frozenset()
    kinds: tuple[str, ...] = ()
    code: str = ""

    def two_lines(self, event: Event) -> str:
        """Return the two lines of code for a call, empty for none."""
        if self.code != _OF_FUNCTION:
            return self.code
        result, first = event.outputs[0], next(iter(event.inputs), None)
        scalar = result.dim is None and result.values.numel() == 1
        return of_function(event.key.function, scalar=scalar, flat=first is not None and first.dim == 0)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_POSITIONS = Cause(
    what="positions made inside the model (counted over its input's length) instead of the batch's position_ids",
    fix="hand the batch's position_ids to the model",
    functions=_names("arange linspace range tril_indices triu_indices"),
)
_LABELS = Cause(
    what="labels shifted inside the model or the step",
    fix="use the batch's shift_labels, shifted whole, with all positions",
    code=LABELS,
)
_SHIFT = Cause(
    what="a shift along the sequence, whose tokens come from another rank's part",
    fix="shift in the collate function, or attend instead",
    functions=_names("roll pad cat concat stack hstack vstack diff narrow __getitem__ split chunk unfold"),
    code=_OF_FUNCTION,
)
_ONE_TOKEN = Cause(
    what="one token of the sequence taken by its index (the first, or the last), which is another on each rank",
    fix="use lightning_sp.reductions (last_token, at_positions)",
    code=ONE_TOKEN,
)
_LENGTH = Cause(
    what="a number made of the length of the input, which is a part's",
    fix="take the length from the batch, not from a tensor's shape",
    code=LENGTH,
)
_MASK = Cause(
    what="an attention whose mask is not the sequence's (dropped, of another form, or of documents that were not declared)",
    fix="is_causal=True, the batch's attention_mask, or packed_documents=True or False",
    functions=_names("scaled_dot_product_attention flex_attention"),
    kinds=("Attention", "Attn"),
)
_LOSS = Cause(
    what="a loss that divides by other numbers than the tokens of all ranks",
    fix="one mean over all tokens, or lightning_sp.reductions",
    functions=_names(
        "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits huber_loss"
    ),
    code=_OF_FUNCTION,
)
_ROWS = Cause(
    what="a loss divided by the batch's rows, where data-parallel groups hold other rows",
    fix="one mean over all tokens, or lightning_sp.reductions.batch_mean",
    code=ROWS,
)
_MIXING = Cause(what="a part that mixes tokens along the sequence", fix="let attention alone do so")

# In this order: the first that fits.
CATALOGUE: tuple[Cause, ...] = (
    Cause(
        what="a convolution along the sequence",
        fix="run it over one token at a time (kernel size 1), or keep it out of the step",
        functions=_names("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc"),
        kinds=("Conv",),
    ),
    Cause(
        what="a recurrence along the sequence",
        fix="use attention; recurrent layers are not split yet",
        functions=_names("gru lstm rnn_tanh rnn_relu gru_cell lstm_cell"),
        kinds=("GRU", "LSTM", "RNN"),
    ),
    Cause(
        what="statistics over this rank's tokens alone",
        fix="use a norm over the features of each token (LayerNorm, RMSNorm)",
        functions=_names("batch_norm instance_norm"),
        kinds=("BatchNorm", "InstanceNorm"),
    ),
    Cause(
        what="a normalisation over the sequence",
        fix="normalise over the features of each token",
        functions=_names("layer_norm group_norm rms_norm normalize norm vector_norm linalg_vector_norm linalg_norm var std var_mean std_mean"),
        code=_OF_FUNCTION,
    ),
    Cause(
        what="pooling over this rank's tokens alone",
        fix="use lightning_sp.reductions (sequence_mean, sequence_max)",
        functions=_names(
            "avg_pool1d avg_pool2d max_pool1d max_pool2d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool1d interpolate"
        ),
        kinds=("Pool",),
        code=_OF_FUNCTION,
    ),
    _MASK,
    Cause(
        what="attention that lightning_sp did not see, written by hand",
        fix="call F.scaled_dot_product_attention",
        functions=_names("softmax log_softmax matmul __matmul__ __rmatmul__ bmm baddbmm einsum masked_softmax sigmoid_attention"),
    ),
    Cause(
        what="a cumulative sum along the sequence",
        fix="compute it in the collate function, from the whole sequence",
        functions=_names("cumsum cumprod cummax cummin logcumsumexp"),
        code=_OF_FUNCTION,
    ),
    Cause(
        what="router statistics, a count of this rank's tokens",
        fix="reduce them over all ranks (lightning_sp.reductions.batch_mean)",
        functions=_names("bincount histc one_hot unique scatter_add index_add scatter_add_ index_add_ scatter_reduce"),
        kinds=("Router", "Gate", "MoE", "Moe"),
    ),
    Cause(
        what="a choice among the tokens (a sort, or the best k of them)",
        fix="choose for each token by itself",
        functions=_names("sort argsort topk kthvalue median argmax argmin searchsorted msort"),
    ),
    Cause(
        what="a mean, sum or maximum over the sequence",
        fix="use lightning_sp.reductions (sequence_mean, sequence_sum, sequence_max)",
        functions=_names("mean sum nanmean nansum amax amin max min logsumexp prod all any count_nonzero __sum__ aminmax"),
        code=_OF_FUNCTION,
    ),
    Cause(
        what="a Fourier transform along the sequence",
        fix="let attention alone mix tokens",
        functions=_names("fft_fft fft_rfft fft_ifft fft_irfft fft_fft2 fft_fftn stft"),
        code=_OF_FUNCTION,
    ),
    Cause(
        what="a turn of the sequence",
        fix="turn it in the collate function",
        functions=_names("flip fliplr flipud rot90"),
        code=_OF_FUNCTION,
    ),
    Cause(
        what="a tower's tokens placed into this rank's part in their order, and not by global position",
        fix="place them in the collate function, or keep images out",
        functions=_names("masked_scatter masked_scatter_ index_put index_put_ index_copy scatter scatter_ masked_select nonzero where_indices"),
    ),
    Cause(
        what="random numbers drawn in training_step",
        fix="switch them off, or draw them in the data",
        functions=_names("rand randn rand_like randn_like bernoulli multinomial uniform_ normal_ dropout exponential_ bernoulli_ randint"),
    ),
    _POSITIONS,
    _LOSS,
)  # fmt: skip


# What is what it is wherever it stands: the functions of the first five, of cumulative sums and of transforms.
TELLING = frozenset().union(
    *(each.functions for each in CATALOGUE[:5] if each.functions), _names("cumsum fft_fft fft_rfft")
)


def cause_of(event: Event, other: Event, rows: tuple[int, int], of_tables: Callable[[Event], bool]) -> Cause:
    """Return the cause that a call stands for, whose inputs are equal whole and on shards and whose result is not.

    Args:
        event: the call in the whole run.
        other: the same call on shards.
        rows: of the batch whole, and of this rank's group.
        of_tables: whether it reads a table of the model, which has no tokens, at positions of its own.
    """
    function, result = event.key.function, event.outputs[0]
    if function in _SHIFT.functions or function == "flip":
        if of_tables(event):
            return _POSITIONS
        if result.integral:
            return _LABELS
        if result.dim is None and function == "__getitem__":
            return _ONE_TOKEN
        if function in _SHIFT.functions:
            return _SHIFT
    found = next((cause for cause in CATALOGUE if function and function in cause.functions), None)
    if found is not None and not (found is _POSITIONS and not result.integral and result.dim is None):
        return found
    if event.numbers != other.numbers:
        return _ROWS if rows[0] != rows[1] and (rows[0] in event.numbers) else _LENGTH
    by_kind = next((cause for cause in CATALOGUE if any(part in event.kind for part in cause.kinds)), None)
    return by_kind or _MIXING
