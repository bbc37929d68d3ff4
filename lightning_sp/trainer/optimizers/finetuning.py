"""`BaseFinetuning` on a resume: the parameter groups that a checkpoint's run had added are there before its optimizers' state is loaded.

Lightning adds them in `on_fit_start`, by names that the module must have. Those of the wrappers in them may be other ones in each run.
"""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning

from lightning_sp.parameter_names import user_name


def restore_finetuning(trainer: Trainer, module: LightningModule) -> None:
    """Give the optimizers the parameter groups of restored finetuning callbacks, as Lightning's own `on_fit_start` does.

    Args:
        trainer: whose callbacks are restored, and whose optimizers' state is not.
        module: whose parameters they are, by names with those of wrappers or without.
    """
    parameters = {user_name(name): parameter for name, parameter in module.named_parameters()}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, BaseFinetuning) or not callback._restarting:
            continue
        for index, optimizer in enumerate(trainer.optimizers):
            groups = callback._internal_optimizer_metadata.get(index)
            if groups and all(user_name(name) in parameters for group in groups for name in group["params"]):
                optimizer.param_groups = [
                    {**group, "params": [parameters[user_name(name)] for name in group["params"]]} for group in groups
                ]
        callback._restarting = False
