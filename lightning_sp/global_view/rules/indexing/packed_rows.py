"""`torch.nn.utils.rnn`: rows of several lengths, packed one token of each row after the other, and padded again.

x (B, S, E), lengths (B,)  ->  data (N, E)      the tokens that count, each on the rank that had it: nothing moves
lstm(data)                                      each rank has whole rows: two all-to-alls
data (N, E)                ->  (B, T, E)        each token to its place of its row, which is where it is
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sp.global_view.calls.call import NO_RULE, Call, Rule, is_plain, is_sequence, named
from lightning_sp.global_view.exchange.lines import lines_of
from lightning_sp.global_view.exchange.movement import brought, in_order
from lightning_sp.global_view.rules.indexing.chosen import choose
from lightning_sp.global_view.tensors.placement import Placement
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor


def packed(call: Call) -> Any:
    """Pack rows of tokens: those that count, a token of each row after the other."""
    x, lengths, batch_first = call.args[0], call.argument(1, "lengths"), call.argument(2, "batch_first", False)
    if not is_sequence(x) or is_sequence(lengths) or x.placement.dim != (1 if batch_first else 0) or x.dim() < 2:
        return NO_RULE
    x = in_order(x if batch_first else x.transpose(0, 1))
    if x.placement.outer * x.placement.inner > 1:
        return NO_RULE
    lengths = torch.as_tensor(lengths).cpu()
    if int(lengths.min()) < 1 or int(lengths.max()) > x.shape[1] or bool((lengths.diff() > 0).any()):
        return NO_RULE  # torch says what is wrong with it
    sizes = (lengths[None] > torch.arange(int(lengths.max()))[:, None]).sum(1)
    return _packed(x, sizes), sizes


def _places(sizes: Tensor, row: int) -> Tensor:
    """Return where packed tokens are in rows of so many tokens one after the other. Shapes: (T,) -> (N,)."""
    return torch.cat([torch.arange(int(size)) * row + t for t, size in enumerate(sizes)])


def _packed(x: SequenceTensor, sizes: Tensor) -> Any:
    index: list[Any] = [_places(sizes, x.shape[1]).to(x.device), *[slice(None)] * (x.dim() - 2)]
    flat: Any = x.flatten(0, 1)
    return choose(flat, index)


def _padded(data: SequenceTensor, sizes: Tensor, tokens: int, value: float = 0.0) -> Any:
    """Return packed tokens as rows. Shapes: (N, ...), (T,) -> (B, tokens, ...)."""
    root = data.placement.storage.root
    if root is None or data.placement.dim:
        return NO_RULE
    storage, rows = root.for_length(tokens), int(sizes[0])
    own = Placement(storage=storage, dim=1, length=tokens)
    local = data.local.new_full((rows, storage.local_tokens, *data.shape[1:]), value)
    into: Any = SequenceTensor(local, own).flatten(0, 1)
    found: Any = into.index_copy(0, _places(sizes, tokens).to(data.device), data)
    return found.unflatten(0, (rows, tokens))


def padded(call: Call) -> Any:
    """Pad packed rows again."""
    names = ("data", "batch_sizes", "batch_first", "padding_value", "total_length")
    data, sizes, batch_first, value, total = (call.argument(i, name) for i, name in enumerate(names))
    if not is_sequence(data):
        return NO_RULE
    longest = len(sizes)
    found = _padded(data, sizes, max(longest, total or 0), float(value or 0.0))
    if found is NO_RULE:
        return NO_RULE
    lengths = (sizes[None] > torch.arange(int(sizes[0]))[:, None]).sum(1)
    return found if batch_first else found.transpose(0, 1), lengths


def recurrent(call: Call) -> Any:
    """Run a recurrent layer of torch over packed rows: each rank has whole rows; the last states are whole."""
    data, sizes, states = call.args[:3]
    if len(call.args) != 9 or not is_sequence(data) or data.dim() != 2 or not is_plain(sizes):
        return NO_RULE
    several = [states] if isinstance(states, Tensor) else list(states)
    x = _padded(data, sizes, len(sizes))
    if x is NO_RULE or any(not is_plain(each) for each in several):
        return NO_RULE
    lines = lines_of(x, (0,))
    if lines is None:
        return NO_RULE
    lengths = (sizes[None] > torch.arange(int(sizes[0]))[:, None]).sum(1)
    own = lines.of_whole(lengths.to(x.device)).cpu()
    some = torch.nn.utils.rnn.pack_padded_sequence(lines.part, own, batch_first=True)
    given = [lines.of_whole(each.movedim(1, 0)).movedim(0, 1).contiguous() for each in several]
    dropout, training = call.args[6:8]
    with data.placement.storage.own_draws() if dropout and training else nullcontext():
        out, *last = call.function(
            some.data, some.batch_sizes, given[0] if isinstance(states, Tensor) else tuple(given), *call.args[3:]
        )
    rows, _ = torch.nn.utils.rnn.pad_packed_sequence(_with_data(some, out), batch_first=True, total_length=len(sizes))
    result = brought(lines.split(rows), x.placement.storage)
    return (_packed(result, sizes), *(lines.whole(each.transpose(0, 1)).transpose(0, 1) for each in last))


def _with_data(some: Any, data: Tensor) -> Any:
    """Return packed rows with other numbers."""
    return torch.nn.utils.rnn.PackedSequence(data, some.batch_sizes, some.sorted_indices, some.unsorted_indices)


def pad_sequence(call: Call) -> Any:
    """Put rows of several lengths beneath each other, padded behind."""
    rows, batch_first = list(call.args[0]), call.argument(1, "batch_first", False)
    value, side = call.argument(2, "padding_value", 0.0), call.argument(3, "padding_side", "right")
    longest = max(each.shape[0] for each in rows)
    if any(not is_sequence(each) or each.placement.dim for each in rows):
        return NO_RULE
    made: list[Any] = []
    for each in rows:
        missing = longest - each.shape[0]
        sides = (0, missing) if side == "right" else (missing, 0)
        made.append(
            F.pad(in_order(each), (*[0, 0] * (each.dim() - 1), *sides), value=value) if missing else in_order(each)
        )
    widest = max((each.placement.storage for each in made), key=lambda each: each.capacity)
    return torch.stack([brought(each, widest) for each in made], 0 if batch_first else 1)


RULES: dict[str, Rule] = {
    **named("pack_padded_sequence", packed),
    **named("pad_packed_sequence", padded),
    **named("gru lstm rnn_tanh rnn_relu", recurrent),
    **named("pad_sequence", pad_sequence),
}
