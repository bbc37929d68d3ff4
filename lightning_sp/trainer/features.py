"""Features of the Trainer that cannot work on sharded parameters or parts of sequences, refused before the model is set up."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_sp.errors import SequenceParallelError

PRECISIONS = ("64-true", "32-true", "bf16-true", "bf16-mixed")
# They copy the module and write plain tensors into its parameters; newer versions of Lightning alone have the second, and its EMA.
_AVERAGING = ("StochasticWeightAveraging", "WeightAveraging")
_STEPS = {
    TrainerFn.FITTING: ("training_step", "validation_step"),
    TrainerFn.VALIDATING: ("validation_step",),
    TrainerFn.TESTING: ("test_step",),
    TrainerFn.PREDICTING: ("predict_step",),
}


def check_precision(precision: str) -> None:
    """Refuse a precision that needs more than each rank's own numbers."""
    if precision not in PRECISIONS:
        raise SequenceParallelError(
            f"precision={precision!r} is not supported: float16 needs a loss scale that all ranks share; use one of {', '.join(PRECISIONS)}"
        )


def check_trainer_features(trainer: Trainer, module: LightningModule) -> None:
    """Refuse by name what is known to break. Equal on all ranks, so no collective is needed."""
    fn = trainer.state.fn
    averaging = tuple(getattr(callbacks, name) for name in _AVERAGING if hasattr(callbacks, name))
    for callback in trainer.callbacks if fn == TrainerFn.FITTING else ():  # type: ignore[attr-defined]
        if isinstance(callback, averaging):
            raise SequenceParallelError(
                f"the callback {type(callback).__name__} copies the whole module, and each of {trainer.world_size} ranks holds a shard of every "
                "parameter here: it is not supported; average in a callback of your own, each parameter (detach().clone() and lerp_ work "
                "on shards), or average checkpoints after training (lightning_sp.export_checkpoint gives plain state dicts)"
            )
    for name in _STEPS.get(fn, ()) if fn is not None else ():
        if is_param_in_hook_signature(getattr(module, name), "dataloader_iter", explicit=True):
            raise SequenceParallelError(
                f"{name}(dataloader_iter) fetches its batches itself, so they cannot be split over {trainer.world_size} ranks before: it is not "
                f"supported; take a batch instead, {name}(batch, batch_idx)"
            )
