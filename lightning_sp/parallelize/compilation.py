"""Which parts of a model are compiled, by the user or by us: `torch.compile(module)` wraps one, `module.compile()` changes its call."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule

from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.compiled.front_end import FrontEnd, front_end

# The torch that is known to capture tensors of the sequence.
OLDEST = (2, 13)
# What makes code of blocks.
COMPILE_BACKEND = "inductor"
# Their files hold compiled functions that no step of a user's calls unless a module of theirs does.
_NOT_SEARCHED = {"torch", "builtins", "abc", "typing", "lightning", "lightning_sp", "transformers", "torchmetrics"}


def without_compilation(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` has wrapped; any other as it is."""
    return module._orig_mod if isinstance(module, OptimizedModule) else module


def is_compiled(root: nn.Module) -> bool:
    """Return whether a step of a model may run compiled code: one of its modules, their functions, or a function of its files."""
    return compiles_weights(root) or any(_is_function(value) for value in _names_of_packages(root))


def compiles_weights(root: nn.Module) -> bool:
    """Return whether compiled code may use a model's weights: one of its modules, or a function that they or the files of their classes have."""
    functions = chain(_attributes(root), _names_of_files(root))
    return any(True for _ in compiled_modules(root)) or any(_is_function(value) for value in functions)


def compiled_modules(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that are compiled as they are called, outermost first."""
    for module in root.modules():
        if isinstance(module, OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None:
            yield module


@contextmanager
def run_as_written(root: nn.Module, *, with_functions: bool) -> Iterator[int]:
    """Run what the user compiled as it is written while this is entered; give how much is known of: graphs know no rule of a step.

    Args:
        root: whose modules.
        with_functions: functions too, wherever they are. Not where our own compiler runs, for torch switches all of it off.
    """
    compiled = list(compiled_modules(root))
    before = [(each, each.forward, getattr(each, "_compiled_call_impl", None)) for each in compiled]
    values = chain(_attributes(root), _names_of_files(root)) if with_functions else ()
    functions = {id(each) for each in values if _is_function(each)}
    try:
        for each in compiled:
            each._compiled_call_impl = None
            if isinstance(each, OptimizedModule):
                each.forward = each._orig_mod.__call__
        with torch.compiler.set_stance("force_eager") if with_functions else nullcontext():
            yield len(compiled) + len(functions)
    finally:
        for each, forward, call in before:
            each._compiled_call_impl = call
            if isinstance(each, OptimizedModule):
                each.forward = forward


def blocks_to_compile(root: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks of a model but those that the user compiled, in part or within something larger."""
    found = {part for module in compiled_modules(root) for part in module.modules()}
    return [block for block in blocks if found.isdisjoint(block.modules())]


def compile_forwards(blocks: Sequence[nn.Module]) -> FrontEnd:
    """Compile each block's forward for tensors of the sequence, within its hooks and checkpoints; return what does."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST:
        raise SequenceParallelError(
            f"compile=True with global_view=True on torch {torch.__version__}: needs torch {OLDEST[0]}.{OLDEST[1]}, whose torch.compile takes "
            "tensors that show whole sequences; leave compile out, or global_view"
        )
    graphs = front_end(COMPILE_BACKEND)
    for block in blocks:
        block.forward = graphs.compiled(block.forward)
    return graphs


def _own_classes(root: nn.Module) -> set[type]:
    classes = {each for module in root.modules() for each in type(module).__mro__}
    return {each for each in classes if each.__module__.partition(".")[0] not in _NOT_SEARCHED}


def _attributes(root: nn.Module) -> Iterator[Any]:
    """Yield the attributes of a model's modules and of their classes."""
    for holder in (*root.modules(), *_own_classes(root)):
        yield from list(vars(holder).values())


def _names_of_files(root: nn.Module) -> Iterator[Any]:
    """Yield what the files of a model's classes define and import."""
    for name in {each.__module__ for each in _own_classes(root)}:
        if isinstance(module := sys.modules.get(name), ModuleType):
            yield from list(vars(module).values())


def _names_of_packages(root: nn.Module) -> Iterator[Any]:
    """Yield what all files of these packages define and import."""
    packages = {each.__module__.partition(".")[0] for each in _own_classes(root)}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages and isinstance(module, ModuleType):
            yield from list(vars(module).values())


def _is_function(value: Any) -> bool:
    """Return whether `torch.compile` made a function."""
    return callable(value) and "_torchdynamo_orig_callable" in getattr(value, "__dict__", {})
