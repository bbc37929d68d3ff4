"""Functions that change how a tensor is seen: its dims joined, split, exchanged, repeated. All are local.

A view joins rows and tokens into one dim, or tokens and features. Where the sequence goes follows from how many numbers lie before and
behind a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_sp.global_view.calls.call import NO_RULE, Call, Rule, is_plain, is_sequence, named, placed
from lightning_sp.global_view.exchange.lines import along_dim
from lightning_sp.global_view.exchange.movement import as_tokens, brought, counted_through
from lightning_sp.global_view.rules import blocks
from lightning_sp.global_view.tensors.copied_views import CopiedView, memory_of
from lightning_sp.global_view.tensors.deferred import DeferredTensor
from lightning_sp.global_view.tensors.placement import Placement, broadcast, part_of
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor

# Numbers of a row that are moved each by itself: ranks make a plan of so many places.
MOST_IN_A_ROW = 2**24


def viewed(x: SequenceTensor, given: Sequence[int]) -> Any:
    """Return a tensor of the sequence in another shape, of as many numbers; NO_RULE where a token would be taken apart."""
    shape = _resolved(given, x.numel())
    placement = None if blocks.is_one_block(x, given) else _placement_in(x, shape)
    if placement is None:
        found = _in_rows(x, shape)
        found = blocks.in_blocks(x, shape) if found is NO_RULE else found
        return _of_single_numbers(x, shape) if found is NO_RULE else found
    local = list(shape)
    local[placement.dim] = placement.held
    return blocks.joined(SequenceTensor(x.local.reshape(local), placement))


def _in_rows(x: SequenceTensor, shape: Sequence[int]) -> Any:
    """View what was counted through all rows as rows of the batch's sequence, each where its token is; NO_RULE where they are none.

    Shapes: (..., rows * L * inner, ...) -> (..., rows, L, inner, ...).
    """
    own, root = x.placement, x.placement.storage.root
    if root is None or own.storage.block or own.outer * own.inner > 1 or isinstance(x.local, DeferredTensor):
        return NO_RULE
    length, before, behind = root.sequence.length, math.prod(x.shape[: own.dim]), math.prod(x.shape[own.dim + 1 :])
    found = []
    for dim, size in enumerate(shape):
        ahead, after = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
        if size == length and ahead % before == 0 and after % behind == 0 and own.length > length:
            found.append((after // behind, ahead // before, dim))
    if not found:
        return NO_RULE
    inner, rows, dim = min(found)
    local = brought(x, counted_through(root, rows, length, inner)).local
    return placed(local.reshape(*shape[:dim], -1, *shape[dim + 1 :]), Placement(storage=root, dim=dim, length=length))


def _of_single_numbers(x: SequenceTensor, shape: Sequence[int]) -> Any:
    """View a tensor so that tokens are taken apart, each number of a row by itself, as a relative shift does; NO_RULE where these are many."""
    own = x.placement
    lead, behind = x.shape[: own.dim], _last_dims_of_both(x.shape[own.dim + 1 :], shape)
    row = x.numel() // max(1, math.prod(lead) * math.prod(behind))
    if own.outer > 1 or row > MOST_IN_A_ROW or not (lead or behind):
        return NO_RULE
    flat = viewed(x, [*lead, row, *behind])
    return NO_RULE if flat is NO_RULE else blocks.in_blocks(as_tokens(flat), shape)


def _last_dims_of_both(own: Sequence[int], shape: Sequence[int]) -> Sequence[int]:
    """Return the last dims that a view leaves as they are: rows and heads, in Transformer-XL's (S, T, B, H)."""
    count = 0
    while count < len(own) and count < len(shape) and own[-1 - count] == shape[-1 - count]:
        count += 1
    return own[len(own) - count :]


def _resolved(shape: Sequence[int], count: int) -> list[int]:
    known = math.prod(size for size in shape if size != -1)
    return [count // max(1, known) if size == -1 else size for size in shape]


def _placement_in(x: SequenceTensor, shape: Sequence[int]) -> Placement | None:
    own, old = x.placement, x.shape
    before = math.prod(old[: own.dim]) * own.outer
    behind = math.prod(old[own.dim + 1 :]) * own.inner
    if math.prod(shape) != math.prod(old):
        raise RuntimeError(f"shape '{list(shape)}' is invalid for input of size {math.prod(old)}")
    if 0 in old:
        return _placement_of_none(x, shape)
    found = []
    for dim, size in enumerate(shape):
        ahead, after = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
        if before % ahead == 0 and behind % after == 0 and size == before // ahead * own.length * (behind // after):
            found.append(replace(own, dim=dim, outer=before // ahead, inner=behind // after))
    block = own.storage.block

    def num_others(each: Placement) -> int:
        """Numbers beside the sequence in its dim; the tokens of a block are the sequence's own."""
        return each.outer * (each.inner // block if block and each.inner % block == 0 else each.inner)

    # Dims of size 1 beside a sequence of one token, or of one block: the sequence stays in the first.
    return min(found, key=lambda each: (num_others(each), each.outer, each.dim)) if found else None


def _placement_of_none(x: SequenceTensor, shape: Sequence[int]) -> Placement | None:
    """Return where the sequence is in a view of no rows: behind them as before, or one with them."""
    own = x.placement
    behind = [
        dim for dim, size in enumerate(shape) if size == own.shown and (0 in shape[:dim]) == (0 in x.shape[: own.dim])
    ]
    if own.shown and behind:
        return own.at(behind[0])
    return replace(own, dim=shape.index(0), outer=0) if 0 in shape else None


def view(call: Call) -> Any:
    """View or reshape."""
    x, *shape = call.args
    given = (
        shape[0]
        if shape and not isinstance(shape[0], int)
        else shape or call.kwargs.get("shape", call.kwargs.get("size"))
    )
    if not isinstance(given, Sequence):
        return NO_RULE  # of another dtype
    found = viewed(x, given)
    if call.name != "view" or found is NO_RULE or memory_of(found.local) == memory_of(x.local):
        return found
    local, place = found.local, replace(found.placement, copied=None)

    def put() -> None:
        x.copy_(viewed(SequenceTensor(local, place), x.shape))

    # Of what is whole on one device it is a view.
    view = CopiedView(source=x, copy=local, take=lambda: viewed(x, given)._local, put=put)
    return SequenceTensor(local, place.as_copy(view))


def view_as(call: Call) -> Any:
    """View or reshape as another tensor is; what is whole stays whole."""
    x, other = call.args
    if not is_sequence(x):
        return x.view(other.shape) if call.name == "view_as" else x.reshape(other.shape)
    return viewed(x, other.shape)


def flatten(call: Call) -> Any:
    """Join neighbouring dims."""
    x = call.args[0]
    start, end = call.argument(1, "start_dim", 0) % x.dim(), call.argument(2, "end_dim", -1) % x.dim()
    return viewed(x, [*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :]])


def unflatten(call: Call) -> Any:
    """Split a dim."""
    x, dim, sizes = call.args[0], call.argument(1, "dim"), call.argument(2, "sizes")
    dim %= x.dim()
    sizes = sizes if -1 in sizes and dim == x.placement.dim else _resolved(sizes, x.shape[dim])
    return viewed(x, [*x.shape[:dim], *sizes, *x.shape[dim + 1 :]])


def transpose(call: Call) -> Any:
    """Exchange two dims."""
    x = call.args[0]
    if call.name == "T" and x.dim() > 2:
        return NO_RULE
    if call.name in ("t", "T", "mT"):
        one, other = (-2, -1) if x.dim() > 1 else (0, 0)
    else:
        one = call.argument(1, "dim0", call.kwargs.get("axis0"))
        other = call.argument(2, "dim1", call.kwargs.get("axis1"))
    one, other = one % x.dim(), other % x.dim()
    dim = {one: other, other: one}.get(x.placement.dim, x.placement.dim)
    return SequenceTensor(x.local.transpose(one, other), x.placement.at(dim))


def permute(call: Call) -> Any:
    """Put the dims in another order."""
    x, *dims = call.args
    order = dims[0] if dims and not isinstance(dims[0], int) else dims or call.kwargs["dims"]
    order = [dim % x.dim() for dim in order]
    return SequenceTensor(x.local.permute(order), x.placement.at(order.index(x.placement.dim)))


def movedim(call: Call) -> Any:
    """Move dims."""
    x, source, target = call.args[0], call.argument(1, "source"), call.argument(2, "destination")
    local = x.local.movedim(source, target)
    # Where the sequence's dim goes is seen on sizes that number the dims.
    order = x.local.new_empty([1] * x.dim()).expand(*range(1, x.dim() + 1)).movedim(source, target).shape
    return SequenceTensor(local, x.placement.at(list(order).index(x.placement.dim + 1)))


def unsqueeze(call: Call) -> Any:
    """Add a dim of size 1."""
    x, dim = call.args[0], call.argument(1, "dim")
    dim %= x.dim() + 1
    own = x.placement
    return SequenceTensor(x.local.unsqueeze(dim), own.at(own.dim + (dim <= own.dim)))


def squeeze(call: Call) -> Any:
    """Take dims of size 1 away, the sequence's never."""
    x, dim = call.args[0], call.argument(1, "dim")
    chosen = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = [each % x.dim() for each in chosen if x.shape[each] == 1]
    own = x.placement
    if own.dim in gone:
        return NO_RULE
    local = x.local.squeeze(tuple(gone)) if gone else x.local
    return SequenceTensor(local, own.at(own.dim - sum(each < own.dim for each in gone)))


def expand(call: Call) -> Any:
    """Repeat dims of size 1 without memory."""
    x, *shape = call.args
    given = list(shape[0] if shape and not isinstance(shape[0], int) else shape or call.kwargs["size"])
    own = x.placement
    dim = own.dim + len(given) - x.dim()
    if given[dim] not in (-1, own.shown):
        return NO_RULE
    given[dim] = own.held
    return SequenceTensor(x.local.expand(given), own.at(dim))


def expand_as(call: Call) -> Any:
    """Repeat dims of size 1 as another tensor is."""
    x, other = call.args
    if is_sequence(x):
        return expand(replace(call, args=(x, *other.shape)))
    # A whole tensor to the shape of one of the sequence.
    own = other.placement
    dim = own.dim - (other.dim() - x.dim())
    local = part_of(x, own.at(dim)) if dim >= 0 and x.shape[dim] == own.shown else x
    return SequenceTensor(local.expand(other.local.shape), own)


def broadcast_tensors(call: Call) -> Any:
    """Show tensors in the shape that they broadcast to, without memory."""
    given = call.args[0] if len(call.args) == 1 and isinstance(call.args[0], (list, tuple)) else call.args
    shape = broadcast(*(each.shape for each in given))
    if any(shape[each.placement.dim + len(shape) - each.dim()] != each.placement.shown for each in call.tensors):
        return NO_RULE
    return tuple(each.expand(shape) for each in given)


def repeat(call: Call) -> Any:
    """Repeat whole tensors, not along the sequence."""
    x, *times = call.args
    named_times: Any = call.kwargs.get("repeats", call.kwargs.get("dims", ()))
    given = list(times[0] if times and not isinstance(times[0], int) else times or named_times)
    own = x.placement
    given = [1] * (x.dim() - len(given)) + given  # `tile` may name the last dims alone
    dim = own.dim + len(given) - x.dim()
    return NO_RULE if given[dim] != 1 else SequenceTensor(x.local.repeat(given), own.at(dim))


def repeat_interleave(call: Call) -> Any:
    """Repeat each number along another dim."""
    x, dim = call.args[0], call.argument(2, "dim")
    if dim is None or dim % x.dim() == x.placement.dim:
        return NO_RULE
    return placed(call.on_locals(), x.placement)


def cat(call: Call) -> Any:
    """Put tensors beside each other, not along the sequence."""
    tensors, dim = list(call.args[0]), call.argument(1, "dim", call.kwargs.get("axis", 0))
    tensors = [each for each in tensors if is_sequence(each) or not _is_empty(each)]
    if len(tensors) == 1 and call.name != "stack":
        return tensors[0]
    like = call.tensors[0]
    own = like.placement
    dim %= like.dim() + (call.name == "stack")
    if call.name != "stack" and dim == own.dim:
        return NO_RULE
    local = []
    for each in tensors:
        if is_sequence(each):
            each = _split_along(each, own) if call.name == "stack" or each.placement.dim != dim else each
            each = brought(each, own.storage) if each.placement.length == own.length else each
            if each.placement.dim != own.dim or not each.placement.same_tokens(own):
                return _of_one_order(call, tensors)
            local.append(each.local)
        elif is_plain(each) and each.shape[own.dim] == own.shown:
            local.append(part_of(each, own))
        else:
            return NO_RULE
    result = call.function(local, dim)
    return SequenceTensor(result, own.at(own.dim + (call.name == "stack" and dim <= own.dim)))


def _split_along(x: SequenceTensor, own: Placement) -> SequenceTensor:
    """Return a tensor split along a dim where it is along another: pairs of tokens, (B, S, S, E), or chosen ones that are split by rows."""
    if x.placement.dim == own.dim or own.dim >= x.dim():
        return x
    found = along_dim(x, own.dim, own)
    found = along_dim(x, own.dim) if found is None else found
    return x if found is None else found


def _of_one_order(call: Call, tensors: Sequence[Any]) -> Any:
    """Put tensors beside each other whose dims are sequences in other orders, joined rows or blocks: each as one sequence of its own."""
    if not any(is_sequence(each) and each.placement.outer * each.placement.inner > 1 for each in tensors):
        return NO_RULE
    tokens = [as_tokens(each) if is_sequence(each) else each for each in tensors]
    if any(is_sequence(each) and each.placement.outer * each.placement.inner > 1 for each in tokens):
        return NO_RULE
    return cat(replace(call, args=(tokens, *call.args[1:])))


def _is_empty(value: Any) -> bool:
    """Return whether a tensor is what torch leaves out of a `cat`: a cache that holds nothing yet."""
    return is_plain(value) and value.dim() == 1 and value.numel() == 0


def split(call: Call) -> Any:
    """Cut into pieces, not along the sequence."""
    x, dim = call.args[0], call.argument(2, "dim", 0)
    return NO_RULE if dim % x.dim() == x.placement.dim else placed(call.on_locals(), x.placement)


def unbind(call: Call) -> Any:
    """Take a dim apart, not the sequence's."""
    x, dim = call.args[0], call.argument(1, "dim", 0)
    own, dim = x.placement, dim % x.dim()
    return NO_RULE if dim == own.dim else placed(call.on_locals(), own.at(own.dim - (dim < own.dim)))


def iterate(call: Call) -> Any:
    """Go through the first dim."""
    x = call.args[0]
    own = x.placement
    return NO_RULE if own.dim == 0 else iter([SequenceTensor(each, own.at(own.dim - 1)) for each in x.local.unbind(0)])


def moved_elsewhere(call: Call) -> Any:
    """Flip or roll along other dims than the sequence's."""
    x = call.args[0]
    dims = call.argument(2, "dims") if call.name == "roll" else call.kwargs.get("dims", _rest(call.args))
    chosen = [dims] if isinstance(dims, int) else dims
    if not chosen:
        return NO_RULE
    return NO_RULE if x.placement.dim in [each % x.dim() for each in chosen] else placed(call.on_locals(), x.placement)


def _rest(args: tuple[Any, ...]) -> Any:
    """Return what stands behind a tensor: one sequence, or numbers one after the other."""
    return args[1] if len(args) == 2 else args[1:]


def pad(call: Call) -> Any:
    """Pad other dims than the sequence's."""
    x, sizes = call.args[0], list(call.argument(1, "pad"))
    own = x.placement
    padded = {x.dim() - 1 - i // 2 for i, size in enumerate(sizes) if size}
    return NO_RULE if own.dim in padded else placed(call.on_locals(), own)


def complex_view(call: Call) -> Any:
    """View pairs of real numbers as complex ones, and back: the last dim of the real tensor goes or comes."""
    x = call.args[0]
    own = x.placement
    if call.name == "view_as_complex" and own.dim == x.dim() - 1:
        return NO_RULE
    return placed(call.on_locals(), own)


RULES: dict[str, Rule] = {
    **named("view reshape unsafe_view", view),
    **named("view_as reshape_as", view_as),
    **named("flatten", flatten),
    **named("unflatten", unflatten),
    **named("transpose swapaxes swapdims t T mT", transpose),
    **named("permute", permute),
    **named("movedim moveaxis", movedim),
    **named("unsqueeze", unsqueeze),
    **named("squeeze", squeeze),
    **named("expand broadcast_to", expand),
    **named("expand_as", expand_as),
    **named("broadcast_tensors", broadcast_tensors),
    **named("repeat tile", repeat),
    **named("repeat_interleave", repeat_interleave),
    **named("cat concat concatenate stack", cat),
    **named("split chunk tensor_split split_with_sizes", split),
    **named("unbind", unbind),
    **named("iter", iterate),
    **named("flip roll", moved_elsewhere),
    **named("pad", pad),
    **named("view_as_complex view_as_real", complex_view),
}
