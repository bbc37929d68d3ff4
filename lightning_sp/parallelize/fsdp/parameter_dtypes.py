"""Modules that change the dtype of their own layers in their forward, as some routers of experts do.

    self.classifier = self.classifier.to(self.dtype)

On one device the layer is float32 from its first forward on, in a float64 or bfloat16 model. FSDP2 gathers into memory that the parameter no
longer uses. So a layer that its module's source casts in this way has that dtype before it is sharded, in a unit of its own, for a unit has one
dtype: the cast then does nothing. Any other change of a dtype is refused.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.fsdp.parameter_groups import fsdp_modules, parameter_groups, shares_parameters
from lightning_sp.parameter_names import user_name


def layers_cast_in_forward(root: nn.Module) -> list[tuple[nn.Module, torch.dtype]]:
    """Return the layers that their module casts to its own `dtype` in its forward, with that dtype."""
    found = []
    for module in root.modules():
        dtype = vars(module).get("dtype")
        kind: Any = type(module)
        if isinstance(dtype, torch.dtype):
            layers = [module._modules.get(name) for name in _cast_to_own_dtype(kind)]
            found += [(layer, dtype) for layer in layers if layer is not None and any(True for _ in layer.parameters())]
    return found


def cast_as_in_forward(root: nn.Module) -> None:
    """Give such layers the dtype that one device has after its first forward."""
    for layer, dtype in layers_cast_in_forward(root):
        layer.to(dtype)


def units_of_own_dtype(root: nn.Module) -> list[nn.Module]:
    """Return those of them whose dtype is not the only one of the model: each needs a unit of its own."""
    dtypes = {parameter.dtype for parameter in root.parameters() if parameter.is_floating_point()}
    return [layer for layer, _ in layers_cast_in_forward(root)] if len(dtypes) > 1 else []


def units_of_another_dtype(root: nn.Module, units: Collection[nn.Module]) -> list[nn.Module]:
    """Return the layers that need a unit of their own, inner ones first, for the unit that has them trains weights of another dtype.

    Args:
        root: the model, the last unit of all.
        units: the other units.

    Raises:
        SequenceParallelError: a module has weights of two dtypes itself, or shares such weights with others. Equal on all ranks.
    """
    found = []
    for unit in (*units, root):
        members = list(_members(unit, {*units, root}))
        if len(set().union(*map(_dtypes, members))) < 2:
            continue
        main = _dtypes(unit) or _most_common(members)
        for each in members:
            dtypes = _dtypes(each)
            if len(dtypes) > 1 or (dtypes and dtypes != main and shares_parameters(root, each)):
                raise _two_dtypes(root, each, dtypes | main)
            if dtypes and dtypes != main:
                found.append(each)
    return found[::-1]


def know_dtypes_of_frozen(root: nn.Module) -> None:
    """Let gradients of a unit that is frozen at its first forward, and learns later, be reduced as those of any other.

    FSDP2 reads the dtypes of what learns there, once: later gradients would stay in the dtype that they were added up in.
    """
    for group in parameter_groups(fsdp_modules(root)):
        group._init_mp_dtypes = partial(_init_dtypes, group, group._init_mp_dtypes)


def _init_dtypes(group: Any, init: Callable[[], None]) -> None:
    init()
    dtypes = {(each.orig_dtype, each.reduce_dtype) for each in group.fsdp_params}
    if group._orig_dtype is None and len(dtypes) == 1:
        [(group._orig_dtype, group._reduce_dtype)] = dtypes


def _most_common(modules: Iterable[nn.Module]) -> set[torch.dtype]:
    """Return the dtype that most of the weights of some modules have."""
    sizes: Counter[torch.dtype] = Counter()
    for module in modules:
        for _, parameter in _own_parameters(module):
            sizes[parameter.dtype] += parameter.numel() * parameter.requires_grad
    return {sizes.most_common(1)[0][0]}


def _members(module: nn.Module, units: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield a unit and what is in it and has a forward, without units within it."""
    yield module
    for child in module.children():
        if child not in units:
            yield from _members(child, units)


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that a module's forward reads itself: its own, and those of lists and dicts of it, which have no forward."""
    yield from module.named_parameters(recurse=False)
    for name, child in module.named_children():
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            yield from ((f"{name}.{each}", parameter) for each, parameter in child.named_parameters(recurse=False))


def _dtypes(module: nn.Module) -> set[torch.dtype]:
    if isinstance(module, (nn.ParameterList, nn.ParameterDict)):
        return set()
    return {parameter.dtype for _, parameter in _own_parameters(module) if parameter.requires_grad}


def _two_dtypes(root: nn.Module, module: nn.Module, dtypes: Iterable[torch.dtype]) -> SequenceParallelError:
    [name] = [name for name, each in root.named_modules() if each is module]
    own = ", ".join(f"{each} {p.dtype}" for each, p in _own_parameters(module) if p.requires_grad)
    return SequenceParallelError(
        f"{user_name(name) or type(root).__name__} trains weights of {' and '.join(sorted(map(str, dtypes)))} in one unit of FSDP2, which adds "
        f"up gradients of one dtype ({own}): give the ones of the rarer dtype a module of their own, whose forward reads them, or all one dtype"
    )


def _cast_to_own_dtype(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the names x of `self.x = self.x.to(self.dtype)` in the methods of a class, read from its source."""
    names: dict[str, None] = {}
    for each in kind.__mro__:
        if each is nn.Module:
            break
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        except (OSError, TypeError, SyntaxError, IndexError):
            continue
        methods = [part for part in ast.iter_child_nodes(tree) if isinstance(part, ast.FunctionDef)]
        names |= dict.fromkeys(name for method in methods if method.name != "__init__" for name in _names_cast(method))
    return tuple(names)


def _names_cast(method: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(method):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Attribute):
            name = node.targets[0].attr
            if ast.unparse(node) == f"self.{name} = self.{name}.to(self.dtype)":
                yield name


def refuse_changed_dtypes(root: nn.Module) -> None:
    """Look at the parameters of each sharded module once, after its first forward."""
    sharded = {each for each in root.modules() if isinstance(each, FSDPModule)}
    for name, module in root.named_modules():
        if module in sharded:
            dtypes = {each: parameter.dtype for each, parameter in module.named_parameters()}
            hooks: list[Any] = []
            # First, before FSDP2's own hook shards the parameters again.
            hooks.append(module.register_forward_hook(partial(_compare, name, dtypes, hooks), prepend=True))


def _compare(name: str, dtypes: dict[str, torch.dtype], hooks: list[Any], module: nn.Module, *_: Any) -> None:
    hooks.pop().remove()
    changed = {each: p.dtype for each, p in module.named_parameters() if p.dtype != dtypes.get(each, p.dtype)}
    if changed:
        first, dtype = next(iter(changed.items()))
        raise SequenceParallelError(
            f"{f'{name}.' if name else ''}{first} is {dtypes[first]}, and the model makes it {dtype} in its forward ({len(changed)} such in "
            f"{name or 'the model'}): FSDP2 would go on with its values from before; use a precision whose parameters are {dtype} "
            "(precision='32-true' or 'bf16-mixed' for float32), or an option of the model, as config.router_dtype is for routers of experts"
        )
