"""Which behaviours are not plain Lightning's here, and why. Whatever is not named is as on one device."""

from __future__ import annotations

# Refused by a `SequenceParallelError`: what its message says.
REFUSED = {
    "accumulation_scheduled": "GradientAccumulationScheduler",
    "checkpoint_on_exception": "ranks write a checkpoint together",
    "on_exception_checkpoint": "ranks write a checkpoint together",
    "pruning": "ranks the weights of whole tensors",
    "throughput_monitor": "counts the samples of every rank",
    "torch_save_of_the_model": "strategy.whole_state_dict",
    "torch_save_of_a_part": "strategy.whole_state_dict",
    "deepcopy_of_the_module": "before it is sharded",
    "parameters_that_are_dtensors_already": "distribute_tensor while the model is built",
    "fully_shard_by_the_user": "remove fully_shard from configure_model",
    "error in training_step": "the user's training_step failed",
}

# Refused by Lightning itself, on more than one rank.
REFUSED_BY_LIGHTNING = {
    "step_of_none": "returning None in distributed training is not supported",
    "tuner_batch_size": "not supported with distributed strategies",
}

# Another number than plain Lightning's: why.
OTHERWISE = {
    "accumulation_of_other_counts": "tokens weigh alike, whichever micro-batch they are in",
    "accumulation_short_last_window": "a shorter window weighs as it has tokens; Lightning divides it as a full one",
    "torchmetrics_counts_tokens": "a metric's value of one step is a rank's own, as with DDP; an epoch's is of all tokens",
    "optimizer Muon": "it orthogonalizes in bfloat16, in which shards and the whole round otherwise",
}


def outcome(name: str) -> str:
    """Return what becomes of a behaviour, in words."""
    if name in REFUSED:
        return "refused"
    if name in REFUSED_BY_LIGHTNING:
        return "refused by Lightning"
    return OTHERWISE.get(name, "as one device")
