"""Weights that a step reads outside of their module's forward: a penalty on them, their norm, a product by hand. They are shards there.

    elementwise functions, of shards alone      this rank's shard: `WeightShard` shows the whole's shape
    sum, mean, norm of all                      one number; its ranks' terms are added up where it meets anything else
    any other function, or a plain tensor       the weight is gathered for that use

Numbers and gradients are one device's: the objective is the mean over ranks of their losses, so what reaches such a number, or a gathered
weight, is averaged over all ranks. A gradient joins the one that FSDP2 has reduced when the backward has ended: once, however many ranks there
are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._pytree import tree_leaves, tree_map

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.fsdp.dtensor.empty_parts import fails_on_empty_parts
from lightning_sp.parallelize.fsdp.dtensor.outside_gradients import (
    GatheredWeight,
    LocalShard,
    SumOfTerms,
    sharded_tensor,
)
from lightning_sp.weights.single_numbers import in_own_shape, is_single_number

_TORCHS_OWN = torch._C._disabled_torch_function_impl


def _named(names: str) -> frozenset[str]:
    return frozenset(names.split())


# By the names that torch hands over, without underscores: `a * b` is mul, `2 - a` rsub.
_ELEMENTWISE = _named(
    "abs absolute add addcdiv addcmul bfloat16 clamp clamp_max clamp_min clip clone contiguous cos cosh div divide double eq erf exp expm1 "
    "float ge gt half le log log1p log2 lt maximum minimum mul multiply ne neg negative pos positive pow radd rdiv reciprocal relu rmul rpow "
    "rsqrt rsub rtruediv sgn sigmoid sign sin softplus sqrt square sub subtract tanh true_divide truediv"
)
_OF_NUMBERS = _named("add radd sub subtract mul multiply rmul div divide truediv true_divide neg negative")
_SCALES = _named("mul multiply rmul div divide truediv true_divide")
_NORMS = _named("norm linalg_norm linalg_vector_norm vector_norm")
# What reads no number of a tensor.
_ABOUT = _named(
    "size dim ndimension numel nelement stride storage_offset element_size is_floating_point is_complex get_device is_contiguous len hash "
    "is_same_size is_shared is_pinned"
)
# What DTensor does by itself: copies that need no gradient, others of its shape, and what is DTensor's.
_AS_DTENSOR = _named(
    "detach requires_grad full_tensor to_local redistribute backward deepcopy reduce_ex register_hook retain_grad "
    "register_post_accumulate_grad_hook zeros_like ones_like empty_like full_like rand_like randn_like new_empty new_zeros new_ones new_full "
    "new_tensor data_ptr untyped_storage repr format dtensor type share_memory pin_memory"
)
_OF_GRADIENTS = _named("register_hook retain_grad requires_grad grad")
# Properties that are functions of the numbers.
_TURNED = {"T", "mT", "H", "mH", "real", "imag"}
_AUGMENTED = {"iadd", "isub", "imul", "itruediv", "ipow", "idiv"}


@contextmanager
def weights_read_outside() -> Iterator[None]:
    """Let sharded weights be read as on one device within. Calls may be nested."""
    before = vars(DTensor).get("__torch_function__")
    DTensor.__torch_function__ = classmethod(_of_dtensors)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        if before is None:
            del DTensor.__torch_function__
        else:
            DTensor.__torch_function__ = before  # type: ignore[method-assign]


def whole_outputs_of(output: Any) -> Any:
    """Return what a step gives with its numbers of weights finished, and weights whole. Every rank must call it."""
    return tree_map(_made_whole, output)


class WeightShard(Tensor):
    """This rank's shard of a weight, or of what elementwise functions made of it; or this rank's term of a number. It has no memory.

    Args:
        local: the shard, with its graph; of a number the term.
        of: how the weight lies over the ranks.
        is_term: whether it is a number of which the ranks' terms are to be added up.

    Attributes:
        is_made: whether it is whole by now, for something whole was written to it.
    """

    local: Tensor
    of: DTensorSpec
    is_term: bool
    is_made: bool
    _finished: Tensor | None

    @staticmethod
    def __new__(cls, local: Tensor, of: DTensorSpec, is_term: bool = False) -> WeightShard:
        """Return a tensor that shows the weight's shape, or that of a number."""
        shape = () if is_term else of.shape
        made: WeightShard = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,unused-ignore]
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        made.local, made.of, made.is_term, made.is_made, made._finished = local, of, is_term, False, None
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do what a function does on one device."""
        return _called(func, types, args, dict(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse a kernel that was reached past the functions."""
        raise SequenceParallelError(
            f"{func} was reached with a sharded weight, past torch's functions (in compiled code or torch.vmap, say): do it in the forward of "
            "the module that holds the weight, or leave torch.compile and torch.vmap out"
        )

    def whole(self) -> Tensor:
        """Return the whole, or the finished number, on every rank; differentiable.

        Communicates: an all_gather of the weight, or an all_reduce of the number; in the backward an all_reduce of either.
        """
        if self._finished is not None:
            return self._finished
        make = SumOfTerms if self.is_term else GatheredWeight
        found: Tensor = make.apply(self.local, self.of)  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled() or not self.local.requires_grad:
            self._finished = found
        return found

    def like(self, local: Tensor, *, is_term: bool | None = None) -> WeightShard:
        """Return another one of the same ranks."""
        return WeightShard(local, self.of, self.is_term if is_term is None else is_term)


def _of_dtensors(cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    return _called(func, types, args, dict(kwargs or {}))


def _called(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what a function does on one device with the weights among its arguments."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return _property(func, types, args, kwargs, name)
    name = name.strip("_")
    if name in _ABOUT:
        return _TORCHS_OWN(func, types, args, kwargs)
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    active = [each for each in given if _needs_gradient(each)]
    if name in _OF_GRADIENTS and any(isinstance(each, WeightShard) or name == "grad" for each in given):
        raise _refusal(f"{name} of a sharded weight, or of what was made of one")
    single = any(map(is_single_number, given)) and not _writes(func) and name not in _AS_DTENSOR
    if not active and not _meets_plain(given) and not single:
        return _by_dtensor(func, types, args, kwargs)
    if _writes(func) and isinstance(args[0], (DTensor, WeightShard)):
        return _written(func, types, args, kwargs)
    if name in _AS_DTENSOR and not isinstance(args[0], WeightShard):
        return _TORCHS_OWN(func, types, args, kwargs)
    if isinstance(args[0] if args else None, WeightShard) and name in _AS_DTENSOR:
        return _of_shape(func, types, args, kwargs, name)
    found = _on_shards(func, name, args, kwargs, given)
    if found is not None:
        return found
    return func(*tree_map(_made_whole, args), **tree_map(_made_whole, kwargs))


def _by_dtensor(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what DTensor does, and where it has no rule for shards, of uneven ones say, what torch does with whole tensors."""
    try:
        if not fails_on_empty_parts(func, args, kwargs):
            return _TORCHS_OWN(func, types, args, kwargs)
    except (RuntimeError, NotImplementedError):
        if _writes(func):
            raise
    return func(*tree_map(_made_whole, args), **tree_map(_made_whole, kwargs))


def _needs_gradient(value: Tensor) -> bool:
    return isinstance(value, WeightShard) or (
        isinstance(value, DTensor) and torch.is_grad_enabled() and value.requires_grad
    )


def _meets_plain(given: list[Tensor]) -> bool:
    """Return whether sharded tensors stand beside plain ones, with which DTensor does nothing: a number beside a shard is none."""
    plain = [each for each in given if not isinstance(each, (DTensor, WeightShard))]
    numbers = any(isinstance(each, DTensor) and each.dim() == 0 for each in given)
    return bool(plain) and (numbers or any(each.dim() for each in plain))


def _property(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    which, tensor = getattr(func.__self__, "__name__", ""), args[0]
    if name == "__get__" and which in _TURNED and _needs_gradient(tensor):
        return func(_made_whole(tensor))
    if isinstance(tensor, WeightShard) and which == "data":
        return tensor.detach()
    if name == "__get__" and which == "grad" and isinstance(tensor, WeightShard):
        return None
    return _TORCHS_OWN(func, types, args, kwargs)


def _of_shape(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Do of a shard what DTensor does by itself."""
    shard: WeightShard = args[0]
    if shard.is_term or shard.is_made or name in ("backward", "repr", "format", "type"):
        return func(shard.whole(), *args[1:], **kwargs)
    sharded = sharded_tensor(shard.local, shard.of)
    return sharded if name == "detach" else func(sharded, *args[1:], **kwargs)


def _on_shards(func: Any, name: str, args: Any, kwargs: dict[str, Any], given: list[Tensor]) -> Tensor | None:
    """Return a function's result on shards; None where it needs the whole."""
    if not all(isinstance(each, (DTensor, WeightShard)) for each in given) or any(map(is_single_number, given)):
        return None
    shards = [_shard_of(each) for each in given]
    first = shards[0]
    if first is None or any(each is None or not _lie_alike(each, first) for each in shards):
        return None
    if first.is_term:
        return _on_terms(func, name, args, kwargs, shards)
    if name == "to":
        castable = not kwargs and len(args) == 2 and isinstance(args[1], torch.dtype)
        return first.like(first.local.to(args[1])) if castable else None
    if name in _ELEMENTWISE:
        locals_ = iter([each.local for each in shards if each is not None])
        args, kwargs = tree_map(lambda each: next(locals_) if isinstance(each, Tensor) else each, (args, kwargs))
        return first.like(func(*args, **kwargs))
    if len(args) == 1 and not kwargs and name in ("sum", "mean"):
        total = first.local.sum()
        return first.like(total if name == "sum" else total / first.of.shape.numel(), is_term=True)
    if name in _NORMS and (power := _power(name, args, kwargs)) is not None:
        return _norm(first, power)
    return None


def _on_terms(func: Any, name: str, args: Any, kwargs: dict[str, Any], shards: list[Any]) -> WeightShard | None:
    """Return sums of terms, and multiples of one, without adding the ranks' terms up; None for any other function."""
    first: WeightShard = shards[0]
    if kwargs or name not in _OF_NUMBERS:
        return None
    numbers = [each for each in args if not isinstance(each, Tensor)]
    if len(shards) == 2 and name in ("add", "sub", "subtract"):
        return first.like(func(shards[0].local, shards[1].local))
    if len(shards) == 1 and (not numbers or (name in _SCALES and isinstance(args[0], Tensor))):
        return first.like(func(first.local, *numbers))
    if name in ("add", "radd") and numbers == [0]:  # as `sum` of Python's begins
        return first
    return None


def _norm(shard: WeightShard, power: float) -> Tensor:
    total = shard.like(shard.local.abs().pow(power).sum(), is_term=True)
    if power == 1:
        return total
    whole = total.whole()
    # Of zeros torch's gradient is 0, that of a root is not.
    return torch.where(whole > 0, whole, torch.ones_like(whole)).pow(1 / power) * (whole > 0)


def _power(name: str, args: Any, kwargs: dict[str, Any]) -> float | None:
    """Return the order of a norm of all elements; None for another norm."""
    given = dict(kwargs)
    order = given.pop("p", given.pop("ord", args[1] if len(args) > 1 else None))
    if given or len(args) > 2 or (name == "linalg_norm" and order is not None):
        return None
    if order is None or order == "fro":
        return 2.0
    return float(order) if isinstance(order, (int, float)) and order in (1, 2) else None


def _written(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write to a sharded tensor; to what was made of a weight by another one of its shape."""
    into, name = args[0], func.__name__.strip("_")
    if isinstance(into, DTensor):
        args, kwargs = tree_map(lambda each: _plain_dtensor(each), (args, kwargs))
        return _TORCHS_OWN(func, tuple(map(type, args)), args, kwargs)
    out_of_place = getattr(Tensor, f"__{name[1:]}__" if name in _AUGMENTED else name, None)
    result = None if out_of_place is None else out_of_place(*args, **kwargs)
    if not isinstance(result, Tensor) or result.shape != into.shape or result.dtype != into.dtype:
        raise _refusal(f"{func.__name__}, in place into what was made of a sharded weight")
    if isinstance(result, WeightShard) and not result.is_made:
        into.local, into.is_term, into._finished = result.local, result.is_term, None
    else:
        into._finished, into.is_made = _made_whole(result), True
    return into


def _plain_dtensor(value: Any) -> Any:
    if isinstance(value, WeightShard):
        return value.whole() if value.is_term or value.is_made else sharded_tensor(value.local, value.of)
    return value


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name.strip("_") in _AUGMENTED or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _shard_of(value: Tensor) -> WeightShard | None:
    if isinstance(value, WeightShard):
        return None if value.is_made else value
    assert isinstance(value, DTensor)
    if any(each.is_partial() for each in value.placements):
        return None
    return WeightShard(_local_of(value), value._spec)


def _lie_alike(a: WeightShard, b: WeightShard) -> bool:
    same = a.of.mesh == b.of.mesh and a.of.placements == b.of.placements and a.is_term == b.is_term
    return same and (a.is_term or a.of.shape == b.of.shape)


def _local_of(value: DTensor) -> Tensor:
    if not (torch.is_grad_enabled() and value.requires_grad):
        return value._local_tensor
    if getattr(value, "_post_accumulate_grad_hooks", None):
        raise _refusal(
            "a parameter with a post-accumulate hook, which would be called before its whole gradient is there,"
        )
    local: Tensor = LocalShard.apply(value)  # type: ignore[no-untyped-call]
    return local


def _made_whole(value: Any) -> Any:
    """Return a sharded tensor whole, with its graph; anything else as it is."""
    if isinstance(value, WeightShard):
        return value.whole()
    if not isinstance(value, DTensor):
        return value
    if not (torch.is_grad_enabled() and value.requires_grad) or any(each.is_partial() for each in value.placements):
        return in_own_shape(value.full_tensor(), value)
    _say_gathered()
    return in_own_shape(WeightShard(_local_of(value), value._spec).whole(), value)


@lru_cache(maxsize=1)
def _say_gathered() -> None:
    rank_zero_info(
        "a step reads a weight outside of the forward of its module: it is gathered for each such use, and kept whole for the backward; "
        "elementwise functions and sums of weights alone (a penalty) need no gather"
    )


def _refusal(what: str) -> SequenceParallelError:
    return SequenceParallelError(
        f"{what} in a step, outside of the forward of the module that holds the weight: the weight is a shard there, and its gradient is added "
        "up when the backward has ended; do it in that module's forward, or in on_before_optimizer_step; layers that are direct children of "
        "the LightningModule may be used in any way"
    )
