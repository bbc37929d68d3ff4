"""`save_pretrained` on a model whose parameters are sharded: refused with the two lines that do it.

Hugging Face and PEFT read storages that a shard does not have. To gather here would need all ranks, and users save on rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from lightning_sp.errors import SequenceParallelError


def refuse_live_saves(root: nn.Module) -> None:
    """Make every module of Hugging Face and PEFT ask for a whole state, as `save_pretrained(folder, state_dict=...)` takes it."""
    for module in root.modules():
        save = getattr(module, "save_pretrained", None)
        if callable(save) and "save_pretrained" not in vars(module):
            module.save_pretrained = partial(_save, save, type(module).__name__)  # type: ignore[assignment]


def _save(save: Callable[..., Any], name: str, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
    if state_dict is None:
        raise SequenceParallelError(
            f"{name.removeprefix('FSDP')}.save_pretrained: every rank holds a shard of each parameter; gather on all ranks, then save on "
            "one: state = trainer.strategy.whole_state_dict(model); "
            "if trainer.is_global_zero: model.save_pretrained(folder, state_dict=state)"
        )
    return save(*args, state_dict=state_dict, **kwargs)
