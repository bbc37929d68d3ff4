"""What deferred logits know of torch's functions: which ask for a shape, take some tokens, act on each token's logits, or sum one up.

A function that is not here makes the logits. So does one that is, where its arguments are not those of a function of each token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sp.loss.output_head.chunked_head import Autocast
from lightning_sp.loss.output_head.part_functions import ArgMax, ChosenWords, LogSumExp, log_softmax_of_part
from lightning_sp.weights.vocabulary_part import VocabularyPart

# A function of the logits of some tokens, (..., V) -> (..., V).
Recorded = Callable[[Tensor], Tensor]
_OWN_DTYPE = {Tensor.float: torch.float32, Tensor.double: torch.float64, Tensor.bfloat16: torch.bfloat16}


@dataclass(frozen=True)
class Cast:
    """Logits in another dtype."""

    dtype: torch.dtype

    def __call__(self, logits: Tensor) -> Tensor:
        """Cast."""
        return logits.to(self.dtype)

    def of_part(self, part: VocabularyPart) -> Recorded:
        """Return it for a part of the words."""
        return self


@dataclass(frozen=True)
class Pointwise:
    """A function of each logit, and of others that are the same for all tokens.

    Args:
        function: of torch's.
        args: behind the logits.
        kwargs: likewise.
        autocast: of when it was called.
        words: of the logits.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: Autocast
    words: int

    def __call__(self, logits: Tensor) -> Tensor:
        """Call it. Shapes: (..., V) -> (..., V)."""
        with self.autocast.again():
            found: Tensor = self.function(logits, *self.args, **self.kwargs)
        return found

    def of_part(self, part: VocabularyPart) -> Recorded:
        """Return it for a part of the words."""

        def own(value: Any) -> Any:
            of_words = isinstance(value, Tensor) and value.ndim > 0 and value.shape[-1] == self.words
            return part.own(value) if of_words else value

        return replace(
            self, args=tuple(map(own, self.args)), kwargs={name: own(value) for name, value in self.kwargs.items()}
        )


@dataclass(frozen=True)
class Softmax:
    """Probabilities of the words, or their logarithms.

    Args:
        function: of torch's.
        dtype: as it takes it.
        autocast: of when it was called.
    """

    function: Any
    dtype: torch.dtype | None
    autocast: Autocast

    def __call__(self, logits: Tensor) -> Tensor:
        """Call it. Shapes: (..., V) -> (..., V)."""
        with self.autocast.again():
            found: Tensor = self.function(logits, dim=-1, dtype=self.dtype)
        return found

    def of_part(self, part: VocabularyPart) -> Recorded:
        """Return it for a part of the words."""

        def of_part(logits: Tensor) -> Tensor:
            with torch.no_grad():
                dtype = self(logits[:0]).dtype
            found = log_softmax_of_part(part, logits, dtype)
            return found if "log" in self.function.__name__ else found.exp()

        return of_part


# (deferred logits, function, args, kwargs) -> the result, NotImplemented where the logits are needed.
Handler = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]


def _named(names: str, *holders: Any) -> list[Any]:
    """Return the functions of these names that torch has, in each of several places."""
    return [getattr(holder, name) for name in names.split() for holder in holders if hasattr(holder, name)]


def _getters(names: str) -> list[Any]:
    """Return what torch calls for attributes of a tensor."""
    return [vars(torch._C.TensorBase)[name].__get__ for name in names.split() if name in vars(torch._C.TensorBase)]


# Answered by the shape alone.
QUERIES = frozenset(
    [
        *_getters(
            "shape dtype device ndim requires_grad is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn is_mps is_xpu is_nested layout "
            "itemsize _base is_leaf grad _grad"
        ),
        *_named(
            "size dim ndimension numel nelement element_size is_floating_point is_complex is_signed is_inference get_device stride "
            "is_contiguous __len__ __hash__ _is_view",
            Tensor,
        ),
    ]
)


def _last(own: Any, dim: Any) -> bool:
    """Return whether a dim is the vocabulary."""
    return isinstance(dim, int) and dim % own.ndim == own.class_dim % own.ndim


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, *names: str, default: Any = None) -> Any:
    """Return an argument that may be given by place or by name."""
    return args[index] if len(args) > index else next((kwargs[name] for name in names if name in kwargs), default)


# ---- some tokens, or the same in another shape


def _reshape(own: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shape = _argument(args, kwargs, 1, "shape", "size")
    shape = list(args[1:]) if isinstance(shape, int) else shape
    if own.class_dim != -1 or not isinstance(shape, (list, tuple, torch.Size)) or len(shape) < 2:
        return NotImplemented
    shape = list(shape)
    if shape.count(-1) == 1:
        known = 1
        for each in shape:
            known *= each if each != -1 else 1
        if known == 0 or own.numel() % known:
            return NotImplemented
        shape[shape.index(-1)] = own.numel() // known
    if shape[-1] != own.shape[-1]:
        return NotImplemented
    width = own.hidden.shape[-1]
    return own.like(own.hidden.reshape(*shape[:-1], width), lambda made: made.reshape(shape))


def _flatten(own: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = _argument(args, kwargs, 1, "start_dim", default=0) % own.ndim
    last = _argument(args, kwargs, 2, "end_dim", default=-1) % own.ndim
    if own.class_dim != -1 or last >= own.ndim - 1 or first > last:
        return NotImplemented
    return own.like(own.hidden.flatten(first, last), lambda made: made.flatten(first, last))


def _index(own: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    consumed = [
        each.ndim if isinstance(each, Tensor) and each.dtype == torch.bool else 0 if each is None or each is ... else 1
        for each in index
    ]
    if (
        own.class_dim != -1
        or any(isinstance(each, (list, bool)) for each in index)
        or sum(each is ... for each in index) > 1
    ):
        return NotImplemented
    if any(each is ... for each in index):
        place = next(i for i, each in enumerate(index) if each is ...)
        index = (*index[:place], *[slice(None)] * (own.ndim - sum(consumed)), *index[place + 1 :])
        consumed = [
            each.ndim if isinstance(each, Tensor) and each.dtype == torch.bool else int(each is not None)
            for each in index
        ]
    if sum(consumed) == own.ndim and isinstance(index[-1], slice) and index[-1] == slice(None):
        index, consumed = index[:-1], consumed[:-1]
    if sum(consumed) >= own.ndim:
        return NotImplemented
    index = tuple(map(_kept, index))
    return _of_tokens(own, lambda x: x[index])


def _along_tokens(own: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Split, chunk, narrow, select, unbind, index_select: along a dim of tokens."""
    place = {"select": 1, "narrow": 1, "index_select": 1, "unbind": 1}.get(function.__name__, 2)
    dim = _argument(args, kwargs, place, "dim", default=0)
    if own.class_dim != -1 or not isinstance(dim, int) or _last(own, dim):
        return NotImplemented
    rest = [*map(_kept, args[1:])]
    options = {name: _kept(value) for name, value in kwargs.items() if name != "dim"}
    if len(args) > place:
        rest[place - 1] = dim % own.ndim
    else:
        options["dim"] = dim % own.ndim
    return _of_tokens(own, lambda x: function(x, *rest, **options))


def _kept(value: Any) -> Any:
    """Return an index that stays as it is until the logits are made."""
    return value.clone() if isinstance(value, Tensor) else value


def _iterate(own: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if own.class_dim != -1 or own.ndim < 3:
        return NotImplemented
    return iter(_of_tokens(own, lambda x: x.unbind(0)))


def _of_tokens(own: Any, take: Callable[[Tensor], Any]) -> Any:
    taken = take(own.hidden)
    if isinstance(taken, Tensor):
        return own.like(taken, take) if taken.ndim > 1 else NotImplemented
    if any(each.ndim < 2 for each in taken):
        return NotImplemented
    return tuple(own.like(each, lambda made, i=i: take(made)[i]) for i, each in enumerate(taken))


def _move(own: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Move the vocabulary between the last dim and dim 1 of three, as F.cross_entropy takes it."""
    if own.ndim != 3 or kwargs:
        return NotImplemented
    order = list(range(3))
    if function.__name__ == "permute":
        given = args[1:] if isinstance(args[1], int) else args[1]
        order = [dim % 3 for dim in given]
    elif all(isinstance(each, int) for each in args[1:3]) and len(args) == 3:
        a, b = args[1] % 3, args[2] % 3
        if function.__name__ in ("movedim", "moveaxis"):
            order.insert(b, order.pop(a))
        else:
            order[a], order[b] = order[b], order[a]
    if order != [0, 2, 1]:
        return NotImplemented
    return own.like(own.hidden, lambda made: made.permute(order), class_dim=1 if own.class_dim == -1 else -1)


def _contiguous(own: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) > 1 or kwargs:
        return NotImplemented
    return own if own.blank.is_contiguous() else own.like(own.hidden, Tensor.contiguous, class_dim=own.class_dim)


def _copied(own: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) > 1 or kwargs:
        return NotImplemented
    return own.like(own.hidden, Tensor.clone, class_dim=own.class_dim)


def _detach(own: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch.no_grad():
        return own.like(own.hidden.detach(), Tensor.detach, class_dim=own.class_dim)


# ---- functions of each token's logits


def _pointwise(own: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    others = [*args[1:], *kwargs.values()]
    if not all(_is_constant(own, each) for each in others):
        return NotImplemented
    rest = tuple(_as_it_is_now(each) for each in args[1:])
    named = {name: _as_it_is_now(each) for name, each in kwargs.items()}
    return _record(own, Pointwise(function, rest, named, Autocast.now(own.device.type), own.shape[own.class_dim]))


def _as_it_is_now(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_constant(own: Any, value: Any) -> bool:
    """Return whether a value is the same for all tokens, and no parameter: a number, or one for each word."""
    if not isinstance(value, Tensor):
        return value is None or isinstance(value, (int, float, bool, torch.dtype))
    of_words = own.class_dim == -1 and value.ndim and value.shape[-1] == own.shape[-1] and value.ndim <= own.ndim
    is_small = value.ndim == 0 or (of_words and value.numel() == value.shape[-1])
    return bool(is_small) and type(value) is Tensor and not value.requires_grad and value.device == own.device


def _cast(own: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cast to another floating dtype; to a device that it is on."""
    if kwargs.keys() - {"dtype"} or len(args) > 2:
        return NotImplemented
    wanted = _argument(args, kwargs, 1, "dtype")
    wanted = _OWN_DTYPE.get(function, wanted)
    if isinstance(wanted, (str, torch.device)) and torch.device(wanted) == own.device:
        return own
    if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        return NotImplemented
    return own if wanted == own.dtype else own.then(Cast(wanted), wanted)


def _softmax(own: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dim, dtype = _argument(args, kwargs, 1, "dim"), kwargs.get("dtype")
    if not _last(own, dim) or len(args) > 2 or kwargs.keys() - {"dim", "dtype"}:
        return NotImplemented
    return _record(own, Softmax(function, dtype, Autocast.now(own.device.type)))


def _record(own: Any, recorded: Recorded) -> Any:
    """Add a function, if it gives numbers of floating point."""
    with torch.no_grad():
        none = recorded(torch.empty((0, own.shape[own.class_dim]), dtype=own.dtype, device=own.device))
    return own.then(recorded, none.dtype) if none.is_floating_point() else NotImplemented


# ---- one number, or a few, of each token


def _logsumexp(own: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dim = _argument(args, kwargs, 1, "dim")
    dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    if not _last(own, dim) or _argument(args, kwargs, 2, "keepdim", default=False) or own.class_dim != -1:
        return NotImplemented
    return own.each_token(LogSumExp()).view(own.shape[:-1])


def _argmax(own: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _last(own, _argument(args, kwargs, 1, "dim")) or len(args) > 2 or kwargs.keys() - {"dim"}:
        return NotImplemented
    with torch.no_grad():
        found = own.each_token(ArgMax())
    return found.view(own.hidden.shape[:-1])


def _gather(own: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dim, index = _argument(args, kwargs, 1, "dim"), _argument(args, kwargs, 2, "index")
    if not _last(own, dim) or own.class_dim != -1 or tuple(index.shape) != (*own.shape[:-1], 1):
        return NotImplemented
    found = own.each_token(ChosenWords(), index.reshape(-1, 1))
    return found.view(index.shape)


def _table(handler: Handler, *functions: Any) -> dict[Any, Handler]:
    return {each: handler for each in functions}


VIEWS: dict[Any, Handler] = {
    **_table(_reshape, Tensor.view, Tensor.reshape, torch.reshape),
    **_table(_flatten, Tensor.flatten, torch.flatten),
    **_table(_index, Tensor.__getitem__),
    **_table(_along_tokens, *_named("split chunk narrow select unbind index_select", Tensor, torch)),
    **_table(_iterate, Tensor.__iter__),
    **_table(_move, *_named("movedim moveaxis transpose permute swapaxes", Tensor, torch)),
    **_table(_contiguous, Tensor.contiguous),
    **_table(_copied, *_named("clone", Tensor, torch)),
    **_table(_detach, Tensor.detach, Tensor.data.__get__),  # type: ignore[attr-defined]
}
RECORDED: dict[Any, Handler] = {
    **_table(_cast, Tensor.float, Tensor.double, Tensor.bfloat16, Tensor.to, Tensor.type),
    **_table(_softmax, F.softmax, F.log_softmax, *_named("softmax log_softmax", Tensor, torch)),
    **_table(
        _pointwise,
        *_named("mul div true_divide add sub subtract multiply divide neg tanh clamp", Tensor, torch),
        *_named("__mul__ __rmul__ __truediv__ __add__ __radd__ __sub__ __neg__", Tensor),
    ),
}
AGGREGATES: dict[Any, Handler] = {
    **_table(_logsumexp, Tensor.logsumexp, torch.logsumexp),
    **_table(_argmax, Tensor.argmax, torch.argmax),
    **_table(_gather, Tensor.gather, torch.gather),
}
