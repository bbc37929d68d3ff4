"""`DelayedWeights`: what a module holds in the place of its large tensors once it is built, and how each of them is made.

While `configure_model` runs the module has fake tensors. When it ends they become parameters and buffers of the meta device, as on the ranks
that receive them, and their recipes are kept beside them until the module is sharded.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map

from lightning_sp.parallelize.delayed_init.checkpoint_files import PretrainedFiles
from lightning_sp.parallelize.delayed_init.recipes import View, make
from lightning_sp.parallelize.delayed_init.recorder import Recorder, real_values

# The attribute of a module with its recipes, from the end of configure_model until it is sharded.
_DELAYED = "_lightning_sp_delayed"
# What torch keeps of a tensor beside its values, and attributes of the user's own.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class DelayedWeights:
    """Recipes of parameters and buffers by name; a class because each is used once, and what it holds is then freed.

    Args:
        recipes: by the names of `named_parameters` and `named_buffers`; none on ranks that receive their weights.
    """

    def __init__(self, recipes: dict[str, View]) -> None:
        self._recipes = recipes
        self._dtypes: dict[str, list[torch.dtype]] = {name: [] for name in recipes}
        self.refusal: str | None = None  # for all ranks to agree on

    @classmethod
    def of(cls, module: nn.Module) -> DelayedWeights:
        """Return those of a module, which no longer has them then."""
        found = vars(module).pop(_DELAYED, None)
        return found if isinstance(found, DelayedWeights) else cls({})

    @property
    def names(self) -> Collection[str]:
        """Return which are still to be made."""
        return self._recipes.keys()

    def note_dtypes(self, module: nn.Module) -> None:
        """Note a cast of the whole module: what is lost in it is lost, whatever comes next."""
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, dtypes in self._dtypes.items():
            dtypes.append(tensors[name].dtype)

    def take(self, name: str) -> Tensor:
        """Make a tensor, whole, in the host's memory; its recipe is forgotten."""
        tensor = make(self._recipes.pop(name))
        for dtype in self._dtypes.pop(name):
            tensor = tensor.to(dtype)
        return tensor

    def add(self, others: DelayedWeights) -> None:
        """Take up the recipes of what was built later; they are newer."""
        self._recipes |= others._recipes
        self._dtypes |= others._dtypes
        self.refusal = self.refusal or others.refusal


@contextmanager
def recorded(module: nn.Module, *, draws: bool) -> Iterator[Recorder]:
    """Let what is built of a module within the block have no memory, and the module its recipes after it.

    Args:
        module: that is built in place.
        draws: whether this rank is the one that draws.
    """
    recorder = Recorder(draws=draws)
    files = PretrainedFiles(recorder)
    recorder.before_each = files.follow
    try:
        with warnings.catch_warnings(), recorder:
            # By copy.deepcopy, which looks whether there is memory.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
            yield recorder
    finally:
        files.release()
    weights = _settled(module, recorder, keeps=draws)
    weights.refusal = _held_elsewhere(recorder)
    earlier = vars(module).setdefault(_DELAYED, DelayedWeights({}))
    earlier.add(weights)


def _held_elsewhere(recorder: Recorder) -> str | None:
    """Return a refusal of tensors without memory that something else than the module holds."""
    if recorder.num_alive:
        gc.collect()
    if not recorder.num_alive:
        return None
    return (
        f"{recorder.num_alive} large tensors that configure_model has made (64 KiB and more) are held by something "
        "that is no module, list, tuple or dict in the LightningModule, and have no memory yet: hold them there or as buffers, or give "
        "delayed_init=False, with which rank 0 builds the whole model in its memory"
    )


def _settled(root: nn.Module, recorder: Recorder, *, keeps: bool) -> DelayedWeights:
    """Put tensors of the meta device, or real ones where only those serve, in the place of fake ones."""
    recipes = {
        name: recorder.view(tensor)
        for name, tensor in (*root.named_parameters(), *root.named_buffers())
        if recorder.is_recorded(tensor)
    }
    replaced: dict[int, tuple[Tensor, Tensor]] = {}
    replace = partial(_replaced, recorder=recorder, known=replaced)
    for module in root.modules():
        of_module: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in of_module:
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = replace(tensor, make_real=False)
    for module in root.modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                _replace_attribute(module, name, value, replace, keeps=keeps)
    return DelayedWeights(recipes if keeps else {})


def _replace_attribute(module: nn.Module, name: str, value: Any, replace: Callable[..., Any], *, keeps: bool) -> None:
    """Make the tensors that an attribute holds, in lists, tuples and dicts too; those that rank 0 sends stay without values elsewhere."""
    if isinstance(value, Tensor):
        new: Any = replace(value, make_real=keeps)
    elif isinstance(value, (list, tuple, dict)):
        found = False

        def each(leaf: Any) -> Any:
            nonlocal found
            other = replace(leaf, make_real=True) if isinstance(leaf, Tensor) else leaf
            found = found or other is not leaf
            return other

        new = tree_map(each, value)
        if not found:
            return
    else:
        return
    if new is not value:
        vars(module)[name] = new


def _replaced(
    tensor: Tensor, *, recorder: Recorder, known: dict[int, tuple[Tensor, Tensor]], make_real: bool
) -> Tensor:
    """Return what stands for a tensor from now on: itself, if it has memory."""
    if id(tensor) in known:
        return known[id(tensor)][1]
    new: Tensor
    if _is_made_of_others(tensor):
        new = _with_real_parts(tensor, recorder)
    elif not recorder.is_recorded(tensor):
        values = real_values(tensor) if isinstance(tensor, FakeTensor) else None
        if values is None:
            return tensor
        new = values
    elif make_real:
        new = make(recorder.view(tensor))
    else:
        new = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter) and new is not tensor:
        new = _as_parameter(new, tensor, recorder.own_attributes)
    known[id(tensor)] = (tensor, new)  # alive, so that no other has its id
    return new


def _is_made_of_others(tensor: Tensor) -> bool:
    return bool(is_traceable_wrapper_subclass(tensor))


def _as_parameter(values: Tensor, like: nn.Parameter, of_torch: Collection[str]) -> nn.Parameter:
    """Return a parameter with the hooks, flags and attributes of another."""
    parameter = values if isinstance(values, nn.Parameter) else nn.Parameter(values, requires_grad=like.requires_grad)
    for name in _HOOKS:
        if (hooks := getattr(like, name, None)) is not None:
            setattr(parameter, name, hooks)
    for name, value in vars(like).items():
        if name not in of_torch:
            setattr(parameter, name, value)
    return parameter


def _with_real_parts(tensor: Tensor, recorder: Recorder) -> Tensor:
    """Return a tensor that is made of others (a quantized weight), each with its values; itself, if they have them."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: getattr(tensor, name) for name in names}
    real = {name: _replaced(part, recorder=recorder, known={}, make_real=True) for name, part in parts.items()}
    if all(real[name] is parts[name] for name in names):
        return tensor
    unflatten: Any = type(tensor).__tensor_unflatten__  # type: ignore[attr-defined]
    made: Tensor = unflatten(real, context, tensor.size(), tensor.stride())
    return made
