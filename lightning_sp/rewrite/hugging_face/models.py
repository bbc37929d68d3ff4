"""Which modules are Hugging Face models, and whether their attention can be reached."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_sp.errors import SequenceParallelError


def hugging_face_models(module: nn.Module) -> list[Any]:
    """Return the outermost Hugging Face models inside a module; empty without transformers."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return []
    found: list[Any] = []

    def visit(each: nn.Module) -> None:
        if isinstance(each, transformers.PreTrainedModel):
            found.append(each)
            return
        for child in each.children():
            visit(child)

    visit(module)
    return found


def own_class(module: nn.Module) -> type:
    """Return a module's class as its file defines it: FSDP2 makes it a subclass, in torch's own source file."""
    return next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule))


def why_unreachable(model: Any) -> str:
    """Return why a model's attention cannot be reached, empty where it can: such a model takes batches without a sequence alone."""
    # Transformers reads the source file of the class to know.
    name, can_set = own_class(model).__name__, getattr(own_class(model), "_can_set_attn_implementation", None)
    if can_set is not None and not can_set():
        return (
            f"{name} does not reach its attention through Hugging Face's interface, so setting one is a silent no-op: it cannot be rewritten; "
            "use a model whose modeling file calls ALL_ATTENTION_FUNCTIONS (Llama, Qwen, Mistral, Gemma, GPT-2, ...)"
        )
    return ""
