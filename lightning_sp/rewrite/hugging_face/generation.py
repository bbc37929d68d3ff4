"""`model.generate` is refused inside a step, where it would continue a shard."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError


def refuse_generation(model: Any, context: SequenceContext, undo: ExitStack) -> None:
    """Refuse generation while a step is in progress; `undo` takes that back."""
    if not hasattr(model, "generate"):
        return
    original = model.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        if context.step is not None:
            raise SequenceParallelError(
                "model.generate inside a step would continue this rank's shard: call it on whole sequences from a hook such as "
                "on_validation_epoch_end, on all ranks alike"
            )
        return original(*args, **kwargs)

    model.generate = generate
    undo.callback(delete_attribute, model, "generate")


def delete_attribute(target: Any, name: str) -> None:
    """Delete an attribute that was set on an object itself, so that its class's own shows again."""
    if name in vars(target):
        delattr(target, name)
