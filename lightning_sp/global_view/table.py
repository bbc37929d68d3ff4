"""The table of rules: what each function of torch does with a tensor of the sequence.

A function may have several rules; the first that knows its arguments decides. Without one, tensors with few numbers for each token are made
whole for the call, and what has more is refused with the user's line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.calls.all_positions import read_at_all_positions
from lightning_sp.global_view.calls.bodies import body_of
from lightning_sp.global_view.calls.call import (
    MOST_NUMBERS,
    NO_RULE,
    Call,
    Rule,
    is_plain,
    is_sequence,
    whole_is_small,
    writes,
)
from lightning_sp.global_view.calls.keyword_arguments import by_position
from lightning_sp.global_view.calls.taken_tokens import VIEWS, TakenTokens, taken
from lightning_sp.global_view.exchange.movement import as_tokens
from lightning_sp.global_view.rules import (
    backwards,
    composed,
    draws,
    losses,
    pictures,
    pointwise,
    products,
    properties,
    shapes,
    statistics,
)
from lightning_sp.global_view.rules.along_sequence import (
    convolutions,
    norms,
    rearrangement,
    reductions,
    resampling,
    scans,
    spectra,
    whole_lines,
    whole_matrices,
)
from lightning_sp.global_view.rules.attention import made_scores, multihead, scaled_dot_product, score_rows, scores
from lightning_sp.global_view.rules.attention.written_attention import NotCarriedError, Scores
from lightning_sp.global_view.rules.indexing import chosen, into_whole, packed_rows, taking, writing
from lightning_sp.global_view.tensors.copied_views import address_of, memory_of
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor
from lightning_sp.users_line import users_line


def _table() -> dict[str, tuple[Rule, ...]]:
    found: dict[str, list[Rule]] = defaultdict(list)
    for rules in (
        properties.RULES,
        pointwise.RULES,
        draws.RULES,
        shapes.RULES,
        taking.RULES,
        writing.RULES,
        chosen.RULES,
        scans.RULES,
        products.RULES,
        scaled_dot_product.RULES,
        losses.RULES,
        reductions.RULES,
        rearrangement.RULES,
        whole_lines.RULES,
        convolutions.RULES,
        norms.RULES,
        spectra.RULES,
        into_whole.RULES,
        packed_rows.RULES,
        multihead.RULES,
        resampling.RULES,
        whole_matrices.RULES,
        composed.RULES,
        pictures.RULES,
        backwards.RULES,
        statistics.RULES,
        {"softmax": reductions.softmax, "log_softmax": reductions.softmax},
        {"gather": taking.gather_tokens, "take_along_dim": taking.gather_tokens},
    ):
        for name, rule in rules.items():
            found[name].append(rule)
    return {name: tuple(rules) for name, rules in found.items()}


TABLE = _table()
# Not of the operator `x.float()`, which casts: of Python's `float(x)`.
_OF_PYTHON = {"__bool__", "__int__", "__float__", "__index__", "__repr__", "__str__", "__format__", "__array__"}


def name_of(function: Any) -> str:
    """Return a function's name in the table: `add` for `a + b`, `a += b` and `a.add_(b)`, `shape` for the attribute."""
    name = str(getattr(function, "__name__", function))
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        name = name.partition(".")[0].removeprefix("_")
    return str(function.__self__.__name__) if name in ("__get__", "__set__") else _in_table(name)


# By the name: by the function, a method that stands for one of torch's would keep its model alive behind a run.
@lru_cache(maxsize=4096)
def _in_table(name: str) -> str:
    if name in _OF_PYTHON:
        return name
    if name.startswith("__") and name.endswith("__"):
        return name[2:-2]
    # `_dropout` is what stands in the place of `F.dropout` during a run.
    return name.removeprefix("_").removeprefix("linalg_").removeprefix("special_").removesuffix("_")


def dispatch(function: Any, types: Collection[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what the table says of a function.

    Raises:
        SequenceParallelError: no rule knows it with these arguments, and a tensor is too large to be made whole for it.
    """
    args, kwargs = by_position(function, args, kwargs)
    call = Call(name=name_of(function), function=function, args=args, kwargs=kwargs)
    if torch._C._functorch.peek_interpreter_stack() is not None:
        if (read := read_at_all_positions(call)) is not None:
            return read
        _check_transformed(call)
    if Scores in types and (written := _written_scores(call)):
        return call.changed(lambda each: written.get(id(each), each))
    if isinstance(kwargs.get("out"), Tensor) and pointwise.RULES.get(call.name) is not pointwise.pointwise:
        return _with_out(call)
    into = _written(call)
    try:
        result = _by_rules(call, types)
    except NotCarriedError as error:
        return _of_made_scores(call, error)
    except (SequenceParallelError, IndexError):
        raise
    except Exception as error:
        if torch._C._functorch.peek_interpreter_stack() is None:
            raise
        raise _transformed(call) from error  # what ranks send each other is no function of torch that is transformed
    return result if into is None else _stored(call, into, result)


def _check_transformed(call: Call) -> None:
    """Refuse tensors that torch.vmap or torch.func have wrapped: what they show is not what they hold, and they end with their function."""
    wrapped = torch._C._functorch
    for each in tree_leaves((call.args, call.kwargs)):
        if is_plain(each) and (wrapped.is_batchedtensor(each) or wrapped.is_gradtrackingtensor(each)):
            raise _transformed(call)


def _transformed(call: Call) -> SequenceParallelError:
    return SequenceParallelError(
        f"global_view: {call.name} of a tensor of the sequence and one inside of torch.vmap or torch.func ({users_line()}): these see one of "
        "many, or a level of derivatives, that a part of a sequence has not; write it with a dim more, as torch.einsum does, or hand the "
        "function lightning_sp.reductions.unshard(x)"
    )


def _of_made_scores(call: Call, error: NotCarriedError) -> Any:
    """Do with scores that are made what a function does; raise the error where they are too many."""
    leaves = tree_leaves((call.args, call.kwargs))
    noted = [each for each in leaves if isinstance(each, Scores | score_rows.Maxima)]
    is_written = _writes(call) and isinstance(call.args[0], score_rows.Maxima)
    if not noted or is_written or any(each.is_stale for each in noted if isinstance(each, Scores)):
        raise error
    made = scores_made(noted, error, is_kept=_writes(call) or call.name in {*VIEWS, *shapes.RULES, "data"})
    return call.changed(lambda each: made.get(id(each), each))


def _written_scores(call: Call) -> dict[int, Any]:
    """Return what stands for scores that were written to, and for those that are written to now where somebody may have a view of them."""
    found = {}
    for each in tree_leaves((call.args, call.kwargs)):
        if isinstance(each, Scores):
            is_viewed = each.numbers is not None and _writes(call) and each is call.args[0]
            found[id(each)] = made_scores.kept(each) if is_viewed else made_scores.written(each)
    return {number: each for number, each in found.items() if each is not None}


def scores_made(
    noted: Sequence[Any], error: Exception | None = None, is_kept: bool = False
) -> dict[int, SequenceTensor]:
    """Return scores, and maxima of scores, with their numbers, by what tells them apart.

    Args:
        noted: those of attention that was noted.
        error: why they are needed.
        is_kept: they stand for the scores once they are written to.

    Raises:
        SequenceParallelError: they are too many.
    """
    maxima = [each for each in noted if isinstance(each, score_rows.Maxima)]
    given = [each for each in noted if isinstance(each, Scores)]
    number = max((made_scores.num_scores(each) for each in (*given, *(each.scores for each in maxima))), default=0)
    if number > MOST_NUMBERS:
        why = (
            f"{error}; for anything else the"
            if error
            else f"global_view: a function of the user's ({users_line()}) reads scores of an attention;"
        )
        raise SequenceParallelError(
            f"{why} scores are made, of up to {MOST_NUMBERS} numbers on a rank: here {number}"
        ) from error
    made: dict[int, Any] = {id(each): made_scores.kept(each) if is_kept else made_scores.made(each) for each in given}
    made |= {id(each): made_scores.maxima_of(made_scores.made(each.scores), each.taken) for each in maxima}
    return made


def _by_rules(call: Call, types: Collection[type]) -> Any:
    of_scores = Scores in types
    if (of_scores or score_rows.Maxima in types) and (found := score_rows.on_rows(call, types)) is not NO_RULE:
        return found
    if of_scores and call.name not in products.RULES:
        found = properties.RULES[call.name](call) if call.name in properties.RULES else NO_RULE
        return scores.on_scores(call) if found is NO_RULE else found
    for rule in TABLE.get(call.name, ()):
        result = rule(call)
        if result is not NO_RULE:
            return result
    return _whole_or_refused(call, of_scores)


def _whole_or_refused(call: Call, of_scores: bool) -> Any:
    tensors = call.tensors
    if not of_scores and not _writes(call) and all(map(whole_is_small, tensors)):
        tensors[0].placement.storage.note_reduction()
        return _view_of_whole(call) if call.name in VIEWS else call.on_wholes()
    if not of_scores and (body := body_of(call.function)) is not None:
        return body(*call.args, **call.kwargs)
    if not of_scores and not _writes(call) and any(map(_is_more_than_tokens, tensors)):
        counted = {id(each): as_tokens(each) for each in tensors}
        if not any(map(_is_more_than_tokens, counted.values())):
            return call.changed(lambda each: counted.get(id(each), each))
    raise _refusal(call)


def _is_more_than_tokens(x: SequenceTensor) -> bool:
    """Return whether a dim is joined rows, or tokens and their features: few rules know those, and all know it as a sequence of its own."""
    return x.placement.outer * x.placement.inner > 1


def _view_of_whole(call: Call) -> Any:
    """Call a function that gives a view with its tensor whole: what is written there is written to the tensor."""
    x = call.args[0]
    if not is_sequence(x):
        return call.on_wholes()
    whole = taken(x, x.whole, x.copy_)
    return call.changed(lambda each: whole if each is x else each.whole() if is_sequence(each) else each)


def _writes(call: Call) -> bool:
    """Return whether a function writes into its first argument, and that is of the sequence."""
    return (writes(call.function) or call.name == "setitem") and not is_plain(call.args[0])


def _written(call: Call) -> SequenceTensor | None:
    """Return the tensor of the sequence that a function writes into.

    Raises:
        SequenceParallelError: what is written would not reach what one device writes into.
    """
    into = call.kwargs.get("out")
    if into is None and not _writes(call) and not call.kwargs.get("inplace", False):
        return None
    if call.name in shapes.RULES:
        raise _refusal(call, "in place")
    into = call.args[0] if into is None else into
    if not isinstance(into, SequenceTensor):
        return None
    if into.placement.copied is not None and into.placement.copied.put is None:
        raise _refusal(
            call,
            "in place into windows of the sequence, which are a copy here: clone them before, or use torch.where; it",
        )
    storage = into.placement.storage
    if (
        storage.is_traced
        and not storage.only_shapes
        and (into.placement.copied is not None or "copied" in storage.plans)
    ):
        raise NotImplementedError("global_view: a write to a slice, or to what one was taken of: not compiled")
    if call.function.__name__ != "__setitem__" and call.name in pointwise.RULES:
        _check_overlap(call, into)
    return into


def _check_overlap(call: Call, into: SequenceTensor) -> None:
    """Refuse to read some of the tokens that are written: on one device they share memory, and what is read depends on the kernel's order."""
    own, view = into.placement, into.placement.copied
    for each in tree_leaves(call.args[1:]):
        copied = (
            each.placement.copied
            if isinstance(each, SequenceTensor)
            else each.of
            if isinstance(each, TakenTokens)
            else None
        )
        if copied is None:
            continue
        written = address_of(into.local, own.dim, range(own.shown)) if view is None else view.address
        if copied.shares_some(written):
            raise SequenceParallelError(
                f"global_view: {call.name} in place reads some of the tokens that it writes ({users_line()}): on one device they share memory, "
                "and what is read depends on the order in which a kernel goes through them; clone what is read, x[:, 1:] += x[:, :-1].clone()"
            )


def _with_out(call: Call) -> Any:
    """Do what a function does, and put its result into the tensor that is given for it."""
    kwargs = dict(call.kwargs)
    into = kwargs.pop("out")
    result = call.function(*call.args, **kwargs)
    if not isinstance(result, Tensor) or result.shape != into.shape:
        raise _refusal(call, "with out= of another shape")
    if torch.is_grad_enabled() and result.requires_grad:
        raise RuntimeError(
            f"{call.name}(): functions with out=... arguments don't support automatic differentiation, but one of the arguments requires grad."
        )
    return into.copy_(result)


def _stored(call: Call, into: SequenceTensor, result: Any) -> Any:
    """Return what a function gives that writes: what a rule has made anew is put in place; what was written to a copy goes to its source."""
    if isinstance(result, Tensor) and result is not into and call.function.__name__ != "__get__":
        if result.shape != into.shape:
            raise _refusal(call, "in place")
        if not isinstance(result, SequenceTensor) or memory_of(result.local) != memory_of(into.local):
            into.copy_(result)
        result = into
    if into.placement.copied is not None:
        into.placement.copied.write()
    return result


def _refusal(call: Call, how: str = "") -> SequenceParallelError:
    shapes_of = ", ".join(f"{tuple(each.shape)} with the sequence in dim {each.placement.dim}" for each in call.tensors)
    line = users_line()
    return SequenceParallelError(
        f"global_view: {' '.join([call.name, how]).strip()} of {shapes_of or 'scores of an attention'} has no rule that keeps the sequence "
        f"split ({line}); write it with functions that have one, or make the sequence whole with lightning_sp.reductions.unshard(x), which "
        "needs its memory on every rank"
    )
