"""What crosses the boundary of the attention's operator, all of it: `encode` writes an `AttentionSpec` as a `Code`, `decode` reads it by name.

An operator of `torch.library` takes numbers, tensors and strings alone. A mask, a score function or an option that is new is a new name in one
of the tuples below; nobody else reads their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_sp.attention.spec.dropout import AttentionDropout
from lightning_sp.attention.spec.mask import AttentionMask
from lightning_sp.attention.spec.score_mod import function_by_number
from lightning_sp.attention.spec.scores import Scores
from lightning_sp.config import ATTENTION_OPTIONS, AttentionOptions

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionSpec:
    """What an attention is, but for q, k and v.

    Args:
        mask: which keys a query sees; its matrix and its function are in `scores`.
        layout_table: `SequenceLayout.table`, None for zigzag.
        scores: what changes the scores.
        sinks: score of each query head's sink, (H,).
        scale: factor of q k^T.
        options: how it is computed.
        ring_group: name of the group that passes keys and values on; empty for one rank.
        ulysses_group: name of the group that exchanges heads; empty for one rank.
    """

    mask: AttentionMask
    layout_table: Tensor | None
    scores: Scores
    sinks: Tensor | None
    scale: float
    options: AttentionOptions
    ring_group: str = ""
    ulysses_group: str = ""


class Code(NamedTuple):
    """An `AttentionSpec` as arguments of an operator, in the order of its schema."""

    numbers: list[int]
    factors: list[float]
    tensors: list[Tensor]
    options: str


class Static(NamedTuple):
    """What of a code is a string: the options and the names of the groups. Known while a compiler traces, too."""

    options: AttentionOptions
    ring_group: str
    ulysses_group: str


class _Numbers(NamedTuple):
    """Functions are known by their numbers; a compiled graph may take those as symbols, so that only an eager call may look at them."""

    causal: int
    window_before: int  # -1: all
    window_after: int  # -1: all
    chunk_size: int  # 0: none
    score_mod: int  # 0: none
    mask_mod: int  # 0: none
    dropout_seed: int
    dropout_call: int


class _Factors(NamedTuple):
    scale: float
    softcap: float  # 0: none
    dropout: float  # 0: none


class _Tensors(NamedTuple):
    """A value for each tensor that may be given: itself, whether it is there, whether it wants a gradient. A score function's come last."""

    boundaries: Any
    valid: Any
    bidirectional: Any
    key_boundaries: Any
    layout_table: Any
    bias: Any
    dense: Any
    dropout_samples: Any
    sinks: Any


_STATIC = (*ATTENTION_OPTIONS, "ring_group", "ulysses_group")
# No newline: Inductor writes an operator's strings into a comment of the code that it makes for a GPU, as they are.
_SEPARATOR = ";"
# How an option is read from text, by its type.
_READ: dict[str, Callable[[str], Any]] = {"str": str, "bool": lambda text: text == "True", "int": int, "float": float}


def encode(spec: AttentionSpec) -> Code:
    """Return the arguments of an operator that say the same. torch.compile traces it."""
    mask, scores, drop = spec.mask, spec.scores, spec.scores.dropout
    before, after = mask.window_size
    numbers = _Numbers(
        causal=int(mask.causal),
        window_before=-1 if before is None else before,
        window_after=-1 if after is None else after,
        chunk_size=mask.chunk_size or 0,
        score_mod=0 if scores.score_mod is None else scores.score_mod.number,
        mask_mod=0 if scores.mask_mod is None else scores.mask_mod.number,
        dropout_seed=0 if drop is None else drop.seed,
        dropout_call=0 if drop is None else drop.call,
    )
    factors = _Factors(scale=spec.scale, softcap=scores.softcap, dropout=0.0 if drop is None else drop.probability)
    tensors = _Tensors(
        boundaries=mask.boundaries,
        valid=mask.valid,
        bidirectional=mask.bidirectional,
        key_boundaries=mask.key_boundaries,
        layout_table=spec.layout_table,
        bias=scores.bias,
        dense=scores.dense,
        dropout_samples=None if drop is None else drop.samples,
        sinks=spec.sinks,
    )
    given = [int(tensor is not None) for tensor in tensors]
    present = [tensor for tensor in tensors if tensor is not None]
    options, ring, ulysses = spec.options, spec.ring_group, spec.ulysses_group
    lines = [*[str(getattr(options, name)) for name in ATTENTION_OPTIONS], ring, ulysses]
    return Code([*numbers, *given], [*factors], [*present, *scores.tensors], _SEPARATOR.join(lines))


def decode(code: Code) -> AttentionSpec:
    """Return what was encoded. Its functions must still live."""
    (numbers, _), factors = _read(code.numbers), _Factors(*code.factors)
    tensors, of_function = _named(code.numbers, code.tensors)
    static = static_part(code.options)
    drop = None
    if factors.dropout:
        drop = AttentionDropout(
            factors.dropout, numbers.dropout_seed, numbers.dropout_call, samples=tensors.dropout_samples
        )
    before, after = numbers.window_before, numbers.window_after
    mask = AttentionMask(
        causal=bool(numbers.causal),
        boundaries=tensors.boundaries,
        window_size=(None if before < 0 else before, None if after < 0 else after),
        chunk_size=numbers.chunk_size or None,
        valid=tensors.valid,
        bidirectional=tensors.bidirectional,
        key_boundaries=tensors.key_boundaries,
    )
    scores = Scores(
        softcap=factors.softcap,
        bias=tensors.bias,
        score_mod=function_by_number(numbers.score_mod),
        tensors=of_function,
        dense=tensors.dense,
        mask_mod=function_by_number(numbers.mask_mod),
        dropout=drop,
    )
    return AttentionSpec(
        mask=mask, layout_table=tensors.layout_table, scores=scores, sinks=tensors.sinks, scale=factors.scale,
        options=static.options, ring_group=static.ring_group, ulysses_group=static.ulysses_group,
    )  # fmt: skip


@lru_cache(maxsize=32)
def static_part(options: str) -> Static:
    """Return what the string of a code says."""
    texts = dict(zip(_STATIC, options.split(_SEPARATOR), strict=True))
    ring, ulysses = texts.pop("ring_group"), texts.pop("ulysses_group")
    types = {f.name: f.type for f in fields(AttentionOptions)}
    values: dict[str, Any] = {name: _READ[str(types[name])](text) for name, text in texts.items()}
    return Static(AttentionOptions(**values), ring, ulysses)


def hides_by_matrix_or_function(code: Code) -> bool:
    """Return whether a matrix or a function hides keys. Where a compiler traces, no number is read for that but whether it is 0."""
    numbers, given = _read(code.numbers)
    return bool(numbers.mask_mod != 0) or bool(given.dense != 0)


def living_functions(code: Code) -> list[Any]:
    """Return the functions that a code numbers, to be kept while it is needed.

    A compiled graph takes numbers that change from call to call as symbols, and keeps nothing: there the caller's mask keeps its function.
    """
    numbers, _ = _read(code.numbers)
    return [function_by_number(n) for n in (numbers.score_mod, numbers.mask_mod) if isinstance(n, int)]


def learns_scores(code: Code, wanted: Sequence[bool]) -> bool:
    """Return whether something that changes the scores wants a gradient. `wanted`: for each of the code's tensors."""
    named, of_function = _named(code.numbers, wanted)
    return bool(named.bias) or any(of_function)


def encode_gradients(
    code: Code, *, sinks: Tensor | None, bias: Tensor | None, of_function: Sequence[Tensor | None]
) -> list[Tensor]:
    """Return gradients in the order of the code's tensors, in their dtypes, contiguous; empty for those without one."""
    found = dict(sinks=sinks, bias=bias)
    _, given = _read(code.numbers)
    parts = [found.get(name) for name, there in given._asdict().items() if there]
    return [
        like.new_empty(0) if part is None else part.to(like.dtype)
        for like, part in zip(code.tensors, [*parts, *of_function], strict=True)
    ]


def empty_gradients(code: Code, *, learns: bool) -> list[Tensor]:
    """Return what `encode_gradients` returns of a backward, without data."""
    tensors, of_function = _named(code.numbers, code.tensors)

    def empty(tensor: Tensor | None, wanted: bool) -> Tensor | None:
        if tensor is None or not wanted or not tensor.is_floating_point():
            return None
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    return encode_gradients(
        code,
        sinks=empty(tensors.sinks, True),
        bias=empty(tensors.bias, learns),
        of_function=[empty(tensor, learns) for tensor in of_function],
    )


def _read(numbers: Sequence[int]) -> tuple[_Numbers, _Tensors]:
    """Return the numbers by name, and for each tensor whether it was given."""
    size = len(_Numbers._fields)
    return _Numbers(*numbers[:size]), _Tensors(*numbers[size:])


def _named(numbers: Sequence[int], values: Sequence[_T]) -> tuple[_Tensors, tuple[_T, ...]]:
    """Return by name what there is of each of a code's tensors, and that of the score function's."""
    _, given = _read(numbers)
    rest = iter(values)
    named = _Tensors(*[next(rest) if there else None for there in given])
    return named, tuple(rest)
