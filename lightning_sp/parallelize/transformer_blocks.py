"""Finding the transformer blocks of an arbitrary model: the units of FSDP, checkpointing and compilation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from torch import nn

from lightning_sp.parallelize.compilation import without_compilation


def transformer_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model, outermost first, each once; a block inside a block is not another one.

    They are what Hugging Face names in `_no_split_modules`, and the elements of one class in an `nn.ModuleList` or `nn.Sequential`. A
    block that its user compiled is there with what `torch.compile` made of it. What holds a model's input embeddings is none: other
    modules look tokens up in them, outside of its forward.
    """
    names: set[str] = set()
    for each in module.modules():
        names.update(getattr(each, "_no_split_modules", None) or ())
    return list(dict.fromkeys(_outermost(module, names, _input_embeddings(module))))


def _input_embeddings(module: nn.Module) -> set[nn.Module]:
    """Return the tables that the models inside give by Hugging Face's `get_input_embeddings`."""
    found: set[nn.Module] = set()
    for each in module.modules():
        get = getattr(each, "get_input_embeddings", None)
        if callable(get):
            with suppress(NotImplementedError, AttributeError):
                # A tower's may be a convolution, which nobody else uses.
                found.update(table for table in (get(),) if isinstance(table, nn.Embedding))
    return found


def _outermost(module: nn.Module, names: set[str], embeddings: set[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        if type(without_compilation(child)).__name__ in names and embeddings.isdisjoint(child.modules()):
            yield child
        elif isinstance(child, (nn.ModuleList, nn.Sequential)) and _repeats(child):
            yield from child
        else:
            yield from _outermost(child, names, embeddings)


def _repeats(container: nn.Module) -> bool:
    members = [without_compilation(member) for member in container.children()]
    kinds = {type(member) for member in members}
    if kinds & {nn.ModuleList, nn.ModuleDict}:
        return False  # stacks of blocks: without a forward of their own
    # A Sequential of two Linear layers is an MLP, not a stack of blocks: a block has parts of its own.
    return len(kinds) == 1 and all(
        any(True for _ in m.children()) and any(True for _ in m.parameters()) for m in members
    )
