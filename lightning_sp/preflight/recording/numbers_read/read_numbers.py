"""Numbers that a step reads from its batch and may decide by: comparisons of them, and what Python gets of tensors.

    if (batch["input_ids"] > 20).sum() > 20:      a part's count stays below 20 where the whole's does not
    if batch["input_ids"].numel() >= 48:          likewise
    if len(set(ids.tolist())) > 30:               likewise, of what Python or NumPy makes of all tokens

Which numbers are of a rank's tokens is followed from the tensors of the batch through every function of torch that the user's code, or a
library, calls, and through layers. What this package's functions give (a loss, `lightning_sp.reductions`) is of all tokens, and begins anew.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import wraps
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_sp.context.step import SequenceContext
from lightning_sp.global_view.table import name_of
from lightning_sp.preflight.recording.compared import Compared, Entry, note_compared
from lightning_sp.preflight.recording.hidden_terms import Call, users_place
from lightning_sp.preflight.recording.numbers_read.cut_dims import lengths_not_cut
from lightning_sp.preflight.recording.numbers_read.followed_batches import following
from lightning_sp.preflight.recording.numbers_read.followed_layers import followed_layers, shares_tokens
from lightning_sp.preflight.recording.tensor_hooks import tensor_hooks_told
from lightning_sp.preflight.recording.users_lines import INSTALLED, bounds_a_size, compares_products

# Functions whose result is true or false of each number, or of all.
COMPARISONS = {
    *("gt", "ge", "lt", "le", "eq", "ne", "greater", "greater_equal", "less", "less_equal", "not_equal"),
    *("any", "all", "isclose"),
}
# Functions that give one number for many: a step, or a bound, or one that rounding makes one.
STEPS = {
    *("floor", "ceil", "round", "trunc", "fix", "floordiv", "floor_divide", "sign", "sgn", "heaviside", "bucketize"),
    *("searchsorted", "long", "int", "short", "clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum"),
    *("fmax", "fmin", "relu", "relu6", "hardtanh", "hardsigmoid", "hardswish", "threshold", "softshrink", "hardshrink"),
    *("histc", "log_sigmoid", "expit", "tanh", "exp", "expm1", "erf", "softplus", "elu", "celu", "selu", "gelu"),
    *("sigmoid", "silu", "mish"),
}
# Functions by which Python reads one: a truth, or a number.
TRUTHS = {"__bool__", "is_nonzero", "contains", "equal", "allclose"}
ARRAYS = {"tolist", "numpy", "__array__"}
# Of these, those that give numbers of Python's own.
READS = {"item", "tolist", "__int__", "__float__", "__index__"}
NUMBERS = READS | ARRAYS
# How many numbers a tensor has, which its values may decide.
SIZES = {"shape", "size", "numel", "nelement", "len"}
# Those that Python cannot tell from others of its own.
PLAIN = {"__int__", "__float__", "len"}
_COUNTING = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"}
_MOVES = {"to", "cuda", "clone", "detach", "contiguous", "pin_memory"}


class Read(NamedTuple):
    """A call that compares or reads numbers.

    Args:
        numbers: how many it gives, or reads.
        leaves: the tensors of the batch that they were made of, by where they are in it.
        counted: whether it reads a size that values have decided.
        of_layer: whether a layer reads what it was given, which may deal its tokens out to experts by it.
    """

    numbers: int
    leaves: frozenset[Entry]
    counted: bool = False
    of_layer: bool = False


class ReadNumbers(TorchFunctionMode):
    """Notes the calls that compare or read numbers of the batch.

    Args:
        module: whose step it is.

    Attributes:
        sizes: of the batch's tensors.
        calls: that compare or read.
        num_calls: of functions of torch, whatever they do.
        compared: what integers of the batch are compared with.
        cuts: the user's lines that take all or nothing of a dim by a number of Python's, and the lengths of these dims.
        counted_cuts: those of them whose dim is as long as values have decided: chosen tokens.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        super().__init__()
        self._module = module
        # Made of a part's length: its places are not the whole's.
        self._ranges = WeakTensorKeyDictionary()
        self.cuts: dict[tuple[str, int], set[int]] = {}
        self.counted_cuts: set[tuple[str, int]] = set()
        self.sizes: dict[Entry, tuple[int, ...]] = {}
        self.calls: dict[Call, Read] = {}
        self.num_calls = 0
        self.hooked: dict[str, None] = {}
        self.compared: dict[Entry, Compared] = {}
        self._leaves = WeakTensorKeyDictionary()
        self._counted = WeakTensorKeyDictionary()
        # Known of layers alone; single ones of those that values have counted.
        self._of_layers, self._single = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self._numbers: Counter[tuple[str, int, str]] = Counter()

    def hand(self, batch: Any) -> None:
        """Note the tensors of the batch that the step is given, or a hook before it."""
        for entry, each in _tensors_of(batch):
            self._leaves[each] = frozenset({entry})
            self.sizes[entry] = tuple(each.shape)

    def follows(self, tensor: Tensor) -> bool:
        """Return whether a tensor is made of the batch."""
        return tensor in self._leaves

    def forget(self) -> None:
        """Let go of all tensors."""
        self._leaves.clear()
        self._counted.clear()
        self._of_layers.clear()
        self._single.clear()
        self._ranges.clear()

    def follow_layer(self, given: tuple[Any, ...], output: Any) -> None:
        """Note that what a layer gives is made of the batch, where it has something for each token that the layer was given."""
        with torch._C.DisableTorchFunction():
            known = [each for each in _flat(given) if each in self._leaves]
            for each in _flat((output,)) if known else ():
                if each not in self._leaves and any(shares_tokens(each, one) for one in known):
                    self._leaves[each] = frozenset[Entry]().union(*(self._leaves[one] for one in known))
                    self._of_layers[each] = True

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.num_calls += 1
        output = function(*args, **kwargs)
        name = name_of(function)
        self._follow_ranges(name, (*args, *kwargs.values()), output, sys._getframe(1))
        given = [each for each in _flat((*args, *kwargs.values())) if each in self._leaves]
        if not given:
            return output
        place = users_place(sys._getframe(1))
        if place is None and name not in _MOVES:
            return output
        leaves = frozenset[Entry]().union(*(self._leaves[each] for each in given))
        of_layers = all(each in self._of_layers for each in given)
        if place is not None:
            installed = any(folder in place[0] for folder in INSTALLED)
            if not (installed and (of_layers or given[0] in self._single)):
                self._note(place, name, given[0], output, leaves, of_layers=of_layers)
            by_user = name not in _MOVES | SIZES and not installed
            others = [each for each in (*args, *kwargs.values()) if not isinstance(each, Tensor)]
            if not of_layers:
                note_compared(name, [*_flat(args)], others, self._leaves, self.compared, by_user=by_user)
            if name in ("getitem", "setitem") and args[0] in self._leaves:
                lengths = lengths_not_cut(args[0].shape, args[1])
                self.cuts.setdefault(place, set()).update(lengths)
                if lengths and args[0] in self._counted:
                    self.counted_cuts.add(place)
            elif name in SIZES and bounds_a_size(*place) and self._is_of_module(sys._getframe(1)):
                self.cuts.setdefault(place, set()).update(given[0].shape)
        counts = name in _COUNTING or (name == "where" and len(args) == 1) or (name == "getitem" and _by_mask(args[1]))
        counts = counts or any(each in self._counted for each in given)
        single = all(each in self._single for each in given) or (name == "unbind" and given[0] in self._counted)
        for each in (*_flat((output,)), *_written(function, args, kwargs)):
            self._leaves[each] = leaves
            if counts and each.dim():
                self._counted[each] = True
            for known, found in ((of_layers, self._of_layers), (single, self._single)):
                if known:
                    found[each] = True
                elif each in found:  # written to by what is of more
                    del found[each]
        return output

    def _follow_ranges(self, name: str, given: tuple[Any, ...], output: Any, frame: FrameType) -> None:
        """Note where a user's line compares numbers from 0 to a part's length, all with the same outcome."""
        ranges = [each for each in _flat(given) if each in self._ranges] if len(self._ranges) else []
        if name != "arange" and not ranges:
            return
        if type(output) is not Tensor or torch._C._functorch.is_batchedtensor(output):
            return  # it has no numbers here, or those of all ranks; torch.vmap shows one of many
        if (place := users_place(frame)) is None:
            return
        lengths = {output.numel()} if name == "arange" else set[int]().union(*(self._ranges[each] for each in ranges))
        if name not in COMPARISONS:
            self._ranges[output] = lengths
        elif output.numel() and bool((output == output.flatten()[0]).all()):
            self.cuts.setdefault(place, set()).update(lengths)

    def _is_of_module(self, frame: FrameType | None) -> bool:
        """Return whether code is the module's own, which has the step: not that of a layer."""
        for _ in range(2):  # a comprehension has a frame of its own
            # By identity: what an array is equal to is no truth.
            if frame is not None and any(each is self._module for each in frame.f_locals.values()):
                return True
            frame = frame and frame.f_back
        return False

    def _note(
        self,
        place: tuple[str, int],
        name: str,
        given: Tensor,
        output: Any,
        leaves: frozenset[Entry],
        *,
        of_layers: bool,
    ) -> None:
        if name not in COMPARISONS | STEPS | TRUTHS | NUMBERS | SIZES:
            return
        of_layer = of_layers and not self._is_of_module(sys._getframe(2))
        if of_layer and name == "__index__" and not given.is_floating_point():
            return  # of how many tokens a slice of a layer is
        if torch._C._functorch.is_batchedtensor(output if isinstance(output, Tensor) else given):
            return  # torch.vmap shows one of many, by which Python cannot decide
        counted = name in SIZES and given in self._counted
        if name in SIZES and not (counted or compares_products(*place)):
            return
        key = (*place, name)
        call = Call(*key, self._numbers[key])
        self._numbers[key] += 1
        of = output if isinstance(output, Tensor) else given
        self.calls[call] = Read(1 if name in SIZES else of.numel(), leaves, counted, of_layer)


@contextmanager
def numbers_read(module: nn.Module, context: SequenceContext, name: str = "training_step") -> Iterator[ReadNumbers]:
    """Note what a step reads of its batch, where steps see a part of it; what was followed is forgotten behind it.

    Args:
        module: whose step it is.
        context: of the step.
        name: of the step.
    """
    mode, step = ReadNumbers(module), getattr(module, name, None)
    mesh = context.mesh
    if step is None or mesh.layout.size == 1 or (context.global_view and mesh.data_parallel_size == 1):
        yield mode
        return

    @wraps(inspect.unwrap(step))  # Lightning asks for the signature of what is wrapped once
    def noted(*args: Any, **kwargs: Any) -> Any:
        mode.hand((args, kwargs))
        return step(*args, **kwargs)

    own = vars(module).get(name)
    vars(module)[name] = noted
    try:
        with (
            mode,
            following(mode),
            followed_layers(mode.follow_layer),
            nullcontext() if context.global_view else tensor_hooks_told(mesh.layout.size, mode.hooked),
        ):
            yield mode
    finally:
        mode.forget()
        if own is None:
            del vars(module)[name]
        else:
            vars(module)[name] = own


def _tensors_of(value: Any, entry: Entry = ()) -> Iterator[tuple[Entry, Tensor]]:
    """Return the tensors of nested arguments, each with where it is."""
    if isinstance(value, Tensor):
        yield entry, value
        return
    if is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name, None) for each in fields(value)}
    elif not isinstance(value, (Mapping, list, tuple)):
        value = getattr(value, "data", None)  # a batch of a tokenizer, say
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    for key, each in value.items() if isinstance(value, Mapping) else ():
        yield from _tensors_of(each, (*entry, key))


def _flat(values: tuple[Any, ...]) -> Iterator[Tensor]:
    """Return the tensors among arguments, and in lists among them."""
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _flat(tuple(each))


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Return what a function in place writes to."""
    name = str(getattr(function, "__name__", ""))
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    yield from _flat((args[:1] if in_place else (), kwargs.get("out")))


def _by_mask(index: Any) -> bool:
    return any(each.dtype in (torch.bool, torch.uint8) for each in _flat((index,)))
