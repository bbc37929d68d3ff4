"""Finding the transformer blocks of an arbitrary model: the units of FSDP, checkpointing and compilation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from torch import nn

from lightning_sp.parallelize.compilation import without_compilation


def transformer_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model, outermost first, each once; a block inside a block is not another one.

    They are what Hugging Face names in `_no_split_modules`, the elements of one class in an `nn.ModuleList` or `nn.Sequential`, and the
    members of a list of lists (of each layer its attention and its MLP, whatever their classes). A block that its user compiled is there
    with what `torch.compile` made of it. What holds a model's input embeddings is none: other
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
        elif _is_table(child):
            yield from _of_rows(child)
        elif isinstance(child, (nn.ModuleList, nn.Sequential)) and _repeats(child):
            yield from child.children()  # a list may have None among them
        else:
            yield from _outermost(child, names, embeddings)


def _repeats(container: nn.Module) -> bool:
    members = [without_compilation(member) for member in container.children()]
    # A Sequential of two Linear layers is an MLP, not a stack of blocks.
    return len({type(member) for member in members}) == 1 and all(map(_is_block, members))


def _is_table(module: nn.Module) -> bool:
    """Return whether a module is a list of lists: each row holds a layer's parts, an attention and an MLP say, which its owner calls."""
    rows = [*module.children()] if isinstance(module, (nn.ModuleList, nn.ModuleDict)) else []
    return bool(rows) and all(isinstance(row, (nn.ModuleList, nn.ModuleDict)) for row in rows)


def _of_rows(table: nn.Module) -> Iterator[nn.Module]:
    for member in table.children():
        if isinstance(member, (nn.ModuleList, nn.ModuleDict)):
            yield from _of_rows(member)
        elif _is_block(without_compilation(member)):
            yield member


def _is_block(module: nn.Module) -> bool:
    """Return whether a module has parts of its own, and a matrix: a norm around another has none."""
    return any(True for _ in module.children()) and any(each.dim() > 1 for each in module.parameters())
