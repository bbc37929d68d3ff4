"""What goes along the sequence, each line (a row's feature, a row) by itself: scans, orders, windows, pools, recurrent layers.

Each rank gets whole lines for the call: one all-to-all there, one back (`global_view/exchange/lines.py`). What is left of a line without its
tokens, a median say, is whole on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_sp.global_view.calls.call import (
    NO_RULE,
    Call,
    Rule,
    is_plain,
    is_sequence,
    named,
    placed,
    whole_is_small,
    writes,
)
from lightning_sp.global_view.exchange.lines import Lines, along, back, lines_of, of_lines
from lightning_sp.global_view.exchange.movement import brought
from lightning_sp.global_view.tensors.copied_views import CopiedView
from lightning_sp.global_view.tensors.placement import part_of
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor, whole_of


def _is_along(call: Call, position: int) -> bool:
    """Return whether a function goes along the sequence; along the last dim where none is said."""
    x = call.args[0]
    dim = call.argument(position, "dim", call.kwargs.get("axis", -1))
    return is_sequence(x) and isinstance(dim, int) and dim % x.dim() == x.placement.dim


def _on_lines(call: Call, position: int) -> Callable[[Tensor], Any]:
    """Return the function of a call on lines, (m, L), along their last dim."""
    args, kwargs = list(call.args[1:]), {k: v for k, v in call.kwargs.items() if k not in ("dim", "axis")}
    if len(call.args) > position:
        args[position - 1] = -1
    else:
        kwargs["dim"] = -1
    return lambda part: call.function(part, *args, **kwargs)


def scan(call: Call) -> Any:
    """Do along the sequence what gives as many numbers: running products and maxima, orders."""
    if not _is_along(call, 1) or writes(call.function) or len(call.tensors) > 1:
        return NO_RULE
    found = along(call.args[0], _on_lines(call, 1))
    return NO_RULE if found is None else found


def sort(call: Call) -> Any:
    """Sort along the sequence, or say in which order; what has few numbers for each token is made whole, for it mostly is an index."""
    return scan(call) if is_sequence(call.args[0]) and not whole_is_small(call.args[0]) else NO_RULE


def differences(call: Call) -> Any:
    """Subtract from each token the one before; what is put ahead or behind is joined first."""
    x, times, dim = (
        call.argument(i, name, default) for i, name, default in ((0, "input", None), (1, "n", 1), (2, "dim", -1))
    )
    ahead, behind = call.argument(3, "prepend"), call.argument(4, "append")
    if (ahead is not None or behind is not None) and isinstance(dim, int):
        return torch.diff(torch.cat([each for each in (ahead, x, behind) if each is not None], dim), times, dim)
    if isinstance(dim, int) and dim % x.dim() != x.placement.dim:
        return placed(call.on_locals(), x.placement)
    if not _is_along(call, 2):
        return NO_RULE
    found = along(call.args[0], _on_lines(call, 2))
    return NO_RULE if found is None else found


def chosen_of_line(call: Call) -> Any:
    """Take of each line what stands at a place of its order: a median, the k-th, the largest few, a quantile."""
    position = 2 if call.name in ("kthvalue", "topk", "quantile", "nanquantile") else 1
    x = call.args[0]
    if is_sequence(x) and (found := _of_another_dim(call, position)) is not NO_RULE:
        return found
    if not is_sequence(x) or whole_is_small(x):
        return NO_RULE
    has_dim = len(call.args) > position or "dim" in call.kwargs or call.name in ("kthvalue", "topk", "mode")
    if not has_dim or not _is_along(call, position) or len(call.tensors) > 1:
        return NO_RULE
    if call.name in ("quantile", "nanquantile") and isinstance(q := call.argument(1, "q"), Tensor) and q.dim():
        if q.dim() > 1 or not is_plain(q):
            return NO_RULE
        rest = {name: value for name, value in call.kwargs.items() if name != "q"}
        return torch.stack([call.function(x, each, *call.args[2:], **rest) for each in q.unbind(0)])
    found = of_lines(x, _on_lines(call, position))
    return NO_RULE if found is None else found


def _of_another_dim(call: Call, position: int) -> Any:
    """Take it along another dim than the sequence's, which goes or stays."""
    x, dim = call.args[0], call.argument(position, "dim", -1 if call.name in ("kthvalue", "mode") else None)
    own = x.placement
    if not isinstance(dim, int) or dim % x.dim() == own.dim or len(call.tensors) > 1:
        return NO_RULE
    q = call.argument(1, "q") if "quantile" in call.name else None
    ahead = int(isinstance(q, Tensor) and q.dim() > 0)
    keeps = bool(call.argument(position + 1, "keepdim", False))
    return placed(call.on_locals(), own.at(own.dim + ahead - (not keeps and dim % x.dim() < own.dim)))


def windows(call: Call) -> Any:
    """View windows of tokens: a new dim behind the others has the tokens of each; a copy here."""
    if call.function is torch.nn.functional.unfold:
        return _columns(call)
    x, size, step = call.args[0], call.argument(2, "size"), call.argument(3, "step")
    dim = call.argument(1, "dimension")
    own = x.placement
    if not all(isinstance(each, int) for each in (dim, size, step)) or own.outer * own.inner > 1:
        return NO_RULE
    if dim % x.dim() != own.dim:
        return SequenceTensor(x.local.unfold(dim % x.dim(), size, step), own)
    lines = lines_of(x, [each for each in range(x.dim()) if each != own.dim])
    if lines is None or own.length < size:
        return NO_RULE
    found = lines.split(lines.part.unfold(1, size, step))  # (..., windows, size)
    local = found.local.movedim(found.placement.dim, own.dim)
    view = CopiedView(source=x, copy=local, take=lambda: windows(call)._local, put=None)
    return SequenceTensor(local, found.placement.at(own.dim).as_copy(view))


def strided(call: Call) -> Any:
    """View windows of tokens as `as_strided` gives them, which Longformer's chunks overlap by; a copy here.

    Shapes: (..., S, E), or (..., S / n, n, E) in blocks -> (..., windows, size, E)
    """
    x, size, stride = (call.argument(i, name) for i, name in enumerate(("input", "size", "stride")))
    own = x.placement
    block = own.storage.block or 1
    behind = list(x.shape[own.dim + 1 + (block > 1) :])
    if (
        call.argument(3, "storage_offset") is not None
        or own.outer * own.inner > 1
        or len(size) != own.dim + 2 + len(behind)
    ):
        return NO_RULE
    if block > 1 and x.shape[own.dim + 1 : own.dim + 2] != (block,):
        return NO_RULE
    whole = [*x.shape[: own.dim], own.length * block, *behind]
    at = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]  # of memory in the order of the dims
    step, rest = divmod(stride[own.dim], at[own.dim])
    number, width = size[own.dim : own.dim + 2]
    if list(size) != [*whole[: own.dim], number, width, *behind] or rest or step < 1 or not number:
        return NO_RULE
    if (
        list(stride) != [*at[: own.dim], step * at[own.dim], *at[own.dim :]]
        or (number - 1) * step + width > whole[own.dim]
    ):
        return NO_RULE
    found = x.reshape(whole).unfold(own.dim, width, step)
    return found if found is NO_RULE else found.narrow(own.dim, 0, number).movedim(-1, own.dim + 1)


def _columns(call: Call) -> Any:
    """Return `F.unfold` of (B, C, S, W) or (B, C, H, S): the columns of all windows."""
    x = call.args[0]
    own = x.placement
    if x.dim() != 4 or own.dim < 2 or x.shape[5 - own.dim] != 1:
        return placed(call.on_locals(), own) if own.dim == 0 and own.inner == 1 else NO_RULE
    lines = _images(x)
    if lines is None:
        return NO_RULE
    part = torch.nn.functional.unfold(lines[1], *call.args[1:], **call.kwargs)  # (m, kernel, windows)
    found = lines[0].split(part.transpose(1, 2))  # (B, C, windows, kernel)
    local = found.local.transpose(2, 3).flatten(1, 2)
    return SequenceTensor(local, found.placement.at(2))


def _images(x: SequenceTensor) -> tuple[Lines, Tensor] | None:
    """Return lines by rows and channels, and them as images of one channel. Shapes: (B, C, ..., S, ...) -> (m, 1, ..., S, ...)."""
    lines = lines_of(x, (0, 1))
    if lines is None:
        return None
    return lines, lines.part.movedim(1, x.placement.dim - 1).unsqueeze(1)


def pool(call: Call) -> Any:
    """Pool or resize along the sequence, each channel by itself; what is adaptive is whole on every rank."""
    x = call.args[0]
    own = x.placement
    spatial = next((int(size) for size in "123" if f"{size}d" in call.name), x.dim() - 2)
    if x.dim() != spatial + 2 or spatial < 1 or len(call.tensors) > 1:
        return NO_RULE  # without rows, say
    if own.dim < 2:
        return placed(call.on_locals(), own)  # the sequence numbers rows or channels
    found = _images(x)
    if found is None:
        return NO_RULE
    lines, images = found

    def shown(part: Tensor) -> Any:
        if call.name.startswith("adaptive"):
            return lines.whole(part.squeeze(1))
        result = lines.split(part.squeeze(1).movedim(own.dim - 1, 1))
        return SequenceTensor(
            result.local.movedim(2, own.dim).contiguous(), result.placement.at(own.dim)
        )  # as one device's

    result = call.function(images, *call.args[1:], **call.kwargs)
    return shown(result) if isinstance(result, Tensor) else tuple(map(shown, result))


def scattered(call: Call) -> Any:
    """Scatter tokens to places of a sequence, or of a whole tensor: each rank has whole lines of all that take part."""
    into, dim, index = (call.argument(i, name) for i, name in enumerate(("input", "dim", "index")))
    source = call.argument(3, "src", call.kwargs.get("value"))
    rest = {name: value for name, value in call.kwargs.items() if name not in ("dim", "index", "src", "value")}
    if not isinstance(dim, int) or not isinstance(index, Tensor):
        return NO_RULE
    dim %= into.dim()
    given = [each for each in (into, index, source) if isinstance(each, Tensor) and each.dim()]
    others = [i for i in range(into.dim()) if i != dim]
    if any(each.dim() != into.dim() or any(each.shape[i] != into.shape[i] for i in others) for each in given):
        return NO_RULE
    if any(each.placement.dim != dim for each in call.tensors):
        return NO_RULE
    lines = lines_of(call.tensors[0], others)
    if lines is None:
        return NO_RULE

    def part(each: Any) -> Any:
        if not isinstance(each, Tensor) or not each.dim():
            return each
        own = lines_of(each, others) if isinstance(each, SequenceTensor) else None
        return lines.of_whole(each.movedim(dim, -1)) if own is None else own.part

    first = part(into).clone() if writes(call.function) else part(into)
    result = call.function(first, -1, part(index), part(source), *call.args[4:], **rest)
    if is_sequence(into):
        split = back(lines.split(result), dim)
        if not writes(call.function):
            return split
        into.local.copy_(brought(split, into.placement.storage).local)
        return into
    whole = lines.whole(result).movedim(-1, dim)
    return into.copy_(whole) if writes(call.function) else whole


def recurrent(call: Call) -> Any:
    """Run a recurrent layer of torch over the sequence: each rank has whole rows; the last states are whole."""
    x, states, weights = call.args[:3]
    if len(call.args) != 9 or not is_sequence(x) or x.dim() != 3 or not isinstance(weights, (list, tuple)):
        return NO_RULE  # of packed sequences
    batch_first = bool(call.args[8])
    rows = 0 if batch_first else 1
    if x.placement.dim == rows:
        return _of_each_token(call, rows)
    if x.placement.dim != 1 - rows or any(not is_plain(each) for each in _several(states)):
        return NO_RULE
    lines = lines_of(x, (rows,))
    if lines is None:
        return NO_RULE
    given = [lines.of_whole(each.movedim(1, 0)).movedim(0, 1).contiguous() for each in _several(states)]
    own = x.placement
    draws = own.storage.own_draws() if call.args[5] and call.args[6] else nullcontext()
    with draws:
        out, *last = call.function(
            lines.part, given[0] if isinstance(states, Tensor) else tuple(given), *call.args[2:8], True
        )
    result = lines.split(out)
    if not batch_first:
        result = SequenceTensor(result.local.transpose(0, 1).contiguous(), result.placement.at(0))
    return (result, *(lines.whole(each.transpose(0, 1)).transpose(0, 1) for each in last))


def _of_each_token(call: Call, rows: int) -> Any:
    """Run a recurrent layer whose rows are tokens, over the characters of each word say; states are (layers, tokens, features)."""
    x, states = call.args[:2]
    own, of_states = x.placement, x.placement.at(1)
    local = []
    for each in _several(states):
        if is_sequence(each) and each.placement != of_states:  # type: ignore[attr-defined]
            return NO_RULE
        local.append(each.local if isinstance(each, SequenceTensor) else part_of(each, of_states))
    draws = own.storage.own_draws() if call.args[5] and call.args[6] else nullcontext()
    with draws:
        out, *last = call.function(x.local, local[0] if isinstance(states, Tensor) else tuple(local), *call.args[2:])
    return (SequenceTensor(out, own), *(SequenceTensor(each, of_states) for each in last))


def ctc_loss(call: Call) -> Any:
    """Align a sequence with its labels: each rank has whole rows; their losses are whole."""
    names = ("log_probs", "targets", "input_lengths", "target_lengths", "blank", "reduction", "zero_infinity")
    given = [whole_of(call.argument(i, name)) if i else call.argument(i, name) for i, name in enumerate(names)]
    x, targets, lengths, label_lengths, blank, reduction, zeroes = given
    if not is_sequence(x) or x.dim() != 3 or x.placement.dim != 0:
        return NO_RULE
    lengths, label_lengths = (torch.as_tensor(each, device=x.device) for each in (lengths, label_lengths))
    if targets.dim() == 1:  # one row's labels after the other's
        rows = targets.split(label_lengths.tolist())
        targets = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    lines = lines_of(x, (1,))
    if lines is None:
        return NO_RULE
    own = [lines.of_whole(each) for each in (targets, lengths, label_lengths)]
    losses = lines.whole(call.function(lines.part.transpose(0, 1), *own, blank or 0, "none", bool(zeroes)))
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else (losses / label_lengths.clamp(min=1)).mean()


def _several(states: Any) -> list[Tensor]:
    return [states] if isinstance(states, Tensor) else list(states)


RULES: dict[str, Rule] = {
    **named("cumprod logcumsumexp cummax cummin", scan),
    **named("sort argsort", sort),
    **named("diff", differences),
    **named("median nanmedian mode kthvalue topk quantile nanquantile", chosen_of_line),
    **named("unfold", windows),
    **named("as_strided", strided),
    **named("max_pool1d max_pool2d max_pool1d_with_indices max_pool2d_with_indices avg_pool1d avg_pool2d lp_pool1d lp_pool2d", pool),
    **named("max_pool3d avg_pool3d", pool),
    **named("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool1d adaptive_max_pool2d interpolate", pool),
    **named("scatter scatter_add scatter_reduce", scattered),
    **named("ctc_loss", ctc_loss),
    **named("gru lstm rnn_tanh rnn_relu", recurrent),
}  # fmt: skip
