"""Two lines of code for what makes another number of a sequence that is split: an import, and the call that is one device's.

Names in them stand for the user's: x for hidden states (rows, tokens, ...), each for a loss of each token, mask for what counts.
"""

from __future__ import annotations

# Of what mixes tokens in a way of its own: on whole sequences it is one device's code.
_WHOLE = "from lightning_sp.reductions import shard, unshard; x = shard({function}(unshard(x), ...))"
_SEQUENCE_MEAN = "from lightning_sp.reductions import sequence_mean; pooled = sequence_mean(x, mask)"
_SEQUENCE_SUM = "from lightning_sp.reductions import sequence_sum; pooled = sequence_sum(x, mask)"
_SEQUENCE_MAX = "from lightning_sp.reductions import sequence_max; pooled = sequence_max(x, mask)"
_NORM = "from lightning_sp.reductions import sequence_sum; x = x / sequence_sum(x.square()).sqrt()[:, None]"
_BATCH_MEAN = "from lightning_sp.reductions import batch_mean; loss = batch_mean(each, mask)"
_BATCH_SUM = "from lightning_sp.reductions import batch_sum; loss = batch_sum(each, mask) / batch_sum(mask)"
_BY_FUNCTION = {
    **dict.fromkeys(("mean", "nanmean", "adaptive_avg_pool1d", "adaptive_avg_pool2d"), _SEQUENCE_MEAN),
    **dict.fromkeys(("sum", "nansum", "__sum__"), _SEQUENCE_SUM),
    **dict.fromkeys(("amax", "max", "adaptive_max_pool1d"), _SEQUENCE_MAX),
    **dict.fromkeys(("normalize", "norm", "vector_norm", "linalg_vector_norm", "linalg_norm"), _NORM),
}
_TARGETS = "logits.flatten(0, 1), labels.flatten(), reduction='none'), labels.flatten() != -100)"
# 'batchmean' divides by the rows that it was given.
_KL_OF_ROWS = (
    "from lightning_sp.reductions import batch_mean, sequence_sum; "
    "loss = batch_mean(sequence_sum(F.kl_div(log_p, q, reduction='none').sum(-1)), of='rows')"
)
_KL_OF_TOKENS = "from lightning_sp.reductions import batch_mean; loss = batch_mean(F.kl_div(log_p, q, reduction='none').sum(-1), mask)"
_LOSSES = {
    **{
        name: f"from lightning_sp.reductions import batch_mean; loss = batch_mean(F.{name}({_TARGETS}"
        for name in ("cross_entropy", "nll_loss")
    },
    **{
        name: f"from lightning_sp.reductions import batch_mean; loss = batch_mean(F.{name}(output, target, reduction='none'), mask)"
        for name in (
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "huber_loss",
            "binary_cross_entropy",
            "binary_cross_entropy_with_logits",
        )
    },
}

LABELS = (
    "from lightning_sp.reductions import shift; "
    "loss = F.cross_entropy(logits.flatten(0, 1), shift(input_ids, 1, -100).flatten())"
)
ONE_TOKEN = "from lightning_sp.reductions import last_token; pooled = last_token(x, mask)"
LENGTH = "from lightning_sp.reductions import sequence_sum; length = sequence_sum(torch.ones_like(input_ids))[0]"
ROWS = "from lightning_sp.reductions import batch_sum; loss = batch_sum(each) / batch_sum(torch.ones(rows))"


def of_function(function: str, *, scalar: bool, flat: bool) -> str:
    """Return the two lines that do what a function of torch does along the whole sequence.

    Args:
        function: its name.
        scalar: whether it gave one number: a loss, or a part of one.
        flat: whether it was given tokens one after the other, (rows * tokens, ...).
    """
    if function == "kl_div":
        return _KL_OF_TOKENS if flat else _KL_OF_ROWS
    if function in _LOSSES:
        return _LOSSES[function]
    if scalar and function in ("mean", "nanmean"):
        return _BATCH_MEAN
    if scalar and function in ("sum", "nansum", "__sum__"):
        return _BATCH_SUM
    return _BY_FUNCTION.get(function, _WHOLE.format(function=function))
