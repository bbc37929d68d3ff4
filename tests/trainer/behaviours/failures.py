"""A hook of the user's that fails on all ranks: the error is the user's own, and comes at once."""

from __future__ import annotations

import time
from typing import Any

from tests.trainer.behaviours.harness import BEHAVIOURS, Run
from tests.trainer.behaviours.users import User

HOOKS = (
    "setup", "configure_model", "configure_optimizers", "on_fit_start", "on_train_start", "on_train_epoch_start",
    "on_train_batch_start", "training_step", "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "optimizer_step", "on_train_batch_end", "on_train_epoch_end", "on_train_end", "on_fit_end", "teardown", "on_validation_start",
    "on_validation_epoch_start", "on_validation_batch_start", "validation_step", "on_validation_batch_end", "on_validation_epoch_end",
    "on_validation_end", "on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device", "backward",
    "configure_gradient_clipping", "on_save_checkpoint", "train_dataloader", "configure_callbacks", "optimizer_zero_grad",
)  # fmt: skip
# Of a failure all ranks know at once; a collective that some wait in would take its time limit.
AT_ONCE_S = 30.0


def _failing(hook: str, run: Run) -> dict[str, Any]:
    """Fit with a hook that raises; return the error, and whether it came at once."""

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"the user's {hook} failed")

    module = type("Failing", (User,), {hook: fail})()
    trainer = run.trainer(num_sanity_val_steps=1)
    loaders: dict[str, Any] = {} if hook == "train_dataloader" else {"train_dataloaders": run.loader()}
    start = time.monotonic()
    try:
        trainer.fit(module, val_dataloaders=run.validation(4, 24), **loaders)
        trainer.save_checkpoint(run.folder / "x.ckpt")
        return {"error": ""}
    except RuntimeError as error:
        return {"error": str(error), "at once": time.monotonic() - start < AT_ONCE_S}


def _register(hook: str) -> None:
    BEHAVIOURS[f"error in {hook}"] = lambda run: _failing(hook, run)


for _hook in HOOKS:
    _register(_hook)
