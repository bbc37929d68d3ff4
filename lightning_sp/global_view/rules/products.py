"""Matrix products: over features local, over the sequence a sum over the ranks, of queries with keys an attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.global_view.calls.call import (
    MOST_NUMBERS,
    NO_RULE,
    Call,
    Rule,
    is_plain,
    is_sequence,
    named,
    placed,
    writes,
)
from lightning_sp.global_view.exchange.lines import along_dim
from lightning_sp.global_view.exchange.movement import as_tokens, brought
from lightning_sp.global_view.rules.attention.scores import scores_of, times_values
from lightning_sp.global_view.rules.attention.written_attention import Scores, refusal
from lightning_sp.global_view.rules.pointwise import aligned
from lightning_sp.global_view.tensors.placement import part_of
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor


def linear(call: Call) -> Any:
    """Multiply features by a whole weight; tokens, as a mixer does, to what is whole on every rank."""
    x, weight, bias = (call.argument(i, name) for i, name in enumerate(("input", "weight", "bias")))
    if not is_sequence(x) or len(call.tensors) > 1:
        return NO_RULE
    if x.placement.dim < x.dim() - 1:
        return placed(call.on_locals(), x.placement)
    if weight.dim() != 2:
        return NO_RULE
    found = _by_whole(x, weight.mT)
    return found if found is NO_RULE or bias is None else found + bias


def product(call: Call) -> Any:
    """Multiply two matrices, or batches of them."""
    a, b = call.args[:2]
    if call.name == "rmatmul":
        a, b = b, a
    return matmul(a, b)


def matmul(a: Any, b: Any) -> Any:
    """Return `a @ b`; NO_RULE where the two do not fit together."""
    if isinstance(a, Scores):
        return times_values(a, b)
    if isinstance(b, Scores):
        return NO_RULE
    if is_sequence(a) and is_sequence(b):
        return _of_two(a, b)
    if is_sequence(a):
        return _by_whole(a, b)
    return _of_whole(a, b)


def _of_two(a: SequenceTensor, b: SequenceTensor) -> Any:
    own, other = a.placement, b.placement
    if own.dim == a.dim() - 2 and b.dim() > 1 and other.dim == b.dim() - 1:
        found = scores_of(a, b)
        # Of all rows' tokens to all others, as a contrast of tokens has them.
        is_made = found is NO_RULE and own.inner * other.inner == 1 and a.local.shape[-2] * b.numel() <= MOST_NUMBERS
        return matmul(a, b.whole()) if is_made else found
    if own.dim < a.dim() - 2 and b.dim() > 1 and other.dim == b.dim() - 1 and own.outer * own.inner == 1:
        return _by_all_keys(a, b)
    of_rows = own.dim == a.dim() - 2 and other.dim == b.dim() - 2 and b.dim() > 1 and a.shape[-1] == other.shown
    if of_rows and b.numel() <= MOST_NUMBERS:
        return matmul(a, b.whole())  # numbers of each token for all others, times what these have
    ndim = max(a.dim(), b.dim())
    dims = own.dim + ndim - a.dim(), other.dim + ndim - b.dim()
    if dims[0] != dims[1] and max(dims) < ndim - 2:
        return _of_two_splits(a, b, dims)
    contracted = own.dim == a.dim() - 1 and other.dim == max(0, b.dim() - 2)
    if own.shown == other.shown and (own.outer, own.inner) != (
        other.outer,
        other.inner,
    ):  # rows' tokens in one dim, counted through in one
        a, b = as_tokens(a), as_tokens(b)
        own = a.placement
    b = brought(b, own.storage)
    other = b.placement
    if contracted and own.same_tokens(other):
        # Over the sequence: of each rank's tokens, added up.
        return _summed(own.without_padding(a.local, 0), other.without_padding(b.local, 0), a)
    if dims[0] == dims[1] < ndim - 2 and own.same_tokens(other):
        return placed(torch.matmul(a.local, b.local), own.at(dims[0]))  # for each token by itself
    return NO_RULE


def _of_two_splits(a: SequenceTensor, b: SequenceTensor, dims: tuple[int, int]) -> Any:
    """Multiply matrices of which one is split by blocks, one by rows, as blocks are that an index chose: the smaller is split as the larger."""
    ndim = max(a.dim(), b.dim())
    smaller, larger, at = (a, b, dims[1]) if a.numel() < b.numel() else (b, a, dims[0])
    dim = at - (ndim - smaller.dim())
    found = along_dim(smaller, dim, larger.placement) if dim >= 0 else None
    if found is None:
        return NO_RULE
    return matmul(found, larger) if smaller is a else matmul(larger, found)


def _by_all_keys(a: SequenceTensor, b: SequenceTensor) -> Any:
    """Multiply what each token has of its own by the keys of all tokens: (B, S, H, D) @ (B, 1, D, T), as an indexer of keys does."""
    number = a.local.numel() // a.shape[-1] * b.shape[-1]
    return NO_RULE if number > MOST_NUMBERS else matmul(a, b.whole())


def _by_whole(a: SequenceTensor, b: Tensor) -> Any:
    own = a.placement
    if own.dim == a.dim() - 1:
        if b.shape[-2 if b.dim() > 1 else 0] != own.shown:
            return NO_RULE
        own.storage.note_reduction()
        part = part_of(b, own.at(max(0, b.dim() - 2)))
        return _summed(own.without_padding(a.local, 0), own.at(max(0, b.dim() - 2)).without_padding(part, 0), a)
    ndim = max(a.dim(), b.dim())
    dim = own.dim + ndim - a.dim()
    if b.dim() > 2 and dim < ndim - 2 and (at := dim - (ndim - b.dim())) >= 0 and b.shape[at] != 1:
        b = part_of(b, own.at(at))
    return placed(torch.matmul(a.local, b), own.at(dim))


def _of_whole(a: Tensor, b: SequenceTensor) -> Any:
    own = b.placement
    ndim = max(a.dim(), b.dim())
    dim = own.dim + ndim - b.dim()
    if own.dim == b.dim() - 2 or b.dim() == 1:
        own.storage.note_reduction()
        mine = own.at(a.dim() - 1)
        return _summed(mine.without_padding(part_of(a, mine), 0), own.without_padding(b.local, 0), b)
    if a.dim() > 2 and dim < ndim - 2 and (at := dim - (ndim - a.dim())) >= 0 and a.shape[at] != 1:
        a = part_of(a, own.at(at))
    return placed(torch.matmul(a, b.local), own.at(dim - (a.dim() == 1 and dim > ndim - 2)))


def _summed(a: Tensor, b: Tensor, like: SequenceTensor) -> Tensor:
    like.placement.storage.note_reduction()
    return comm.sum_over_ranks(torch.matmul(a, b), like.placement.storage.group)


def baddbmm(call: Call) -> Any:
    """Return beta * input + alpha * (a @ b)."""
    added, a, b = (call.argument(i, name) for i, name in enumerate(("input", "batch1", "batch2")))
    beta, alpha = call.kwargs.get("beta", 1), call.kwargs.get("alpha", 1)
    found = matmul(a, b)
    if found is NO_RULE:
        return NO_RULE
    return found * alpha + added * beta if beta else found * alpha


def bilinear(call: Call) -> Any:
    """Multiply two features by a whole weight."""
    a, b = call.args[:2]
    if not is_sequence(a) or not is_sequence(b) or a.placement != b.placement:
        return NO_RULE
    return placed(call.on_locals(), a.placement)


def of_matrices(call: Call) -> Any:
    """Do what goes by matrices in the last two dims, of each token or block by itself."""
    if any(isinstance(each, Scores) for each in (*call.args, *call.kwargs.values())):
        raise refusal(call.name)
    if any(each.placement.dim >= each.dim() - 2 for each in call.tensors):
        return NO_RULE
    found = aligned(call)
    if found is NO_RULE:
        return NO_RULE
    local, own = found
    # Some of these take no parts that lie apart in memory.
    return placed(local.changed(lambda each: each.local.contiguous() if is_sequence(each) else each), own)


def triangle(call: Call) -> Any:
    """Leave a triangle of matrices whose rows or columns are tokens."""
    found = of_matrices(call)
    x = call.args[0]
    if found is not NO_RULE or x.placement.outer * x.placement.inner > 1 or writes(call.function):
        return found
    there = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device)
    there = getattr(there, call.name)(call.argument(1, "diagonal", 0))
    return torch.where(there, x, torch.zeros((), dtype=x.dtype, device=x.device))


def distances(call: Call) -> Any:
    """Measure from each token to all others, or to whole rows: of this rank's tokens, up to so many numbers as scores."""
    a, b = call.argument(0, "x1"), call.argument(1, "x2")
    if is_plain(a) and is_sequence(b):
        options = {name: value for name, value in call.kwargs.items() if name not in ("x1", "x2")}
        return torch.cdist(b, a, *call.args[2:], **options).mT
    if not is_sequence(a) or a.placement.dim >= a.dim() - 1:
        return NO_RULE
    b = b.whole() if is_sequence(b) else b
    own, ndim = a.placement, max(a.dim(), b.dim())
    number = a.local.numel() // a.shape[-1] * b.shape[-2]
    if number > MOST_NUMBERS or (own.dim < a.dim() - 2 and b.dim() > 2):
        return NO_RULE
    rest = {name: value for name, value in call.kwargs.items() if name not in ("x1", "x2")}
    return SequenceTensor(torch.cdist(a.local, b, *call.args[2:], **rest), own.at(own.dim + ndim - a.dim()))


def tensordot(call: Call) -> Any:
    """Write a product over several dims as `einsum`."""
    a, b, dims = (call.argument(i, name) for i, name in enumerate(("a", "b", "dims")))
    dims = 2 if dims is None else dims
    if isinstance(dims, int):
        dims = (list(range(a.dim() - dims, a.dim())), list(range(dims)))
    if isinstance(dims, Tensor) or a.dim() + b.dim() > 26:
        return NO_RULE
    first, second = ([each] if isinstance(each, int) else [*each] for each in dims)
    one, other = list("abcdefghijklmnopqrstuvwxyz"[: a.dim()]), list("abcdefghijklmnopqrstuvwxyz"[a.dim() :][: b.dim()])
    for i, j in zip(first, second, strict=True):
        other[j] = one[i]
    out = [each for each in one if each not in other] + [each for each in other if each not in one]
    return torch.einsum(f"{''.join(one)},{''.join(other)}->{''.join(out)}", a, b)


def einsum(call: Call) -> Any:
    """Write a product of two as one of batches of matrices; of more one after the other."""
    equation, *operands = call.args
    operands = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    if not isinstance(equation, str):
        return NO_RULE
    equation = _with_output(equation.replace(" ", ""))
    left, _, out = _without_ellipsis(equation, operands).partition("->")
    names = left.split(",")
    if "." in left + out or len(names) != len(operands) or len(set(out)) != len(out):
        return NO_RULE
    names, operands = _each_once(names, out, operands)
    if len(operands) == 1:
        return _of_one(names[0], out, operands[0])
    while len(operands) > 2:
        # The first two, to what the others and the result need of them.
        needed = {*out, *"".join(names[2:])}
        made = "".join(dict.fromkeys(each for each in names[0] + names[1] if each in needed))
        found = _einsum_of_two(names[0], names[1], made, operands[0], operands[1])
        if found is NO_RULE:
            return NO_RULE
        names, operands = [made, *names[2:]], [found, *operands[2:]]
    return _einsum_of_two(names[0], names[1], out, operands[0], operands[1])


def _with_output(equation: str) -> str:
    """Return an equation with what torch gives where none is said: the letters that occur once, in their order."""
    if "->" in equation:
        return equation
    once = sorted(each for each in set(equation) if each.isalpha() and equation.count(each) == 1)
    return f"{equation}->{'...' * ('...' in equation)}{''.join(once)}"


def _each_once(names: list[str], out: str, operands: Sequence[Any]) -> tuple[list[str], list[Any]]:
    """Return operands whose dims have a letter each, which others or the result have too: diagonals, and sums of a dim alone."""
    letters, found = list(names), list(operands)
    for i, x in enumerate(operands):
        name = letters[i]
        while double := next((each for each in name if name.count(each) > 1), None):
            one, other = (at for at, each in enumerate(name) if each == double)
            x = x.diagonal(dim1=one, dim2=other)
            name = name.replace(double, "") + double
        elsewhere = {*out, *"".join(letters[:i] + letters[i + 1 :])}
        gone = [at for at, each in enumerate(name) if each not in elsewhere]
        if gone and len(operands) > 1:
            x, name = x.sum(gone), "".join(each for each in name if each in elsewhere)
        letters[i], found[i] = name, x
    return letters, found


def _without_ellipsis(equation: str, operands: list[Any]) -> str:
    """Return an equation in which letters that it lacks name the dims of its ellipses."""
    left, arrow, out = equation.partition("->")
    names = left.split(",")
    if "..." not in left or len(names) != len(operands):
        return equation
    counts = [x.dim() - len(name) + 3 if "..." in name else 0 for name, x in zip(names, operands, strict=True)]
    free = [each for each in "ZYXWVUTSRQPONMLKJIHGFEDCBA" if each not in equation][: max(counts)]
    if len({count for count in counts if count}) > 1 or len(free) < max(counts):
        return equation  # dims that are broadcast
    letters = "".join(free)
    return ",".join(name.replace("...", letters) for name in names) + arrow + out.replace("...", letters)


def _of_one(name: str, out: str, x: Any) -> Any:
    gone = [i for i, each in enumerate(name) if each not in out]
    left = [each for each in name if each in out]
    x = x.sum(gone) if gone else x
    return x.permute([left.index(each) for each in out])


def _einsum_of_two(first: str, second: str, out: str, a: Any, b: Any) -> Any:
    for name, other in ((first, second), (second, first)):
        if any(each not in out and each not in other for each in name):
            return NO_RULE  # summed alone
    batch = [each for each in first if each in second and each in out]
    summed = [each for each in first if each in second and each not in out]
    rows, columns = [each for each in first if each not in second], [each for each in second if each not in first]
    if is_plain(a) and is_plain(b):
        return torch.einsum(f"{first},{second}->{out}", a, b)
    sizes = dict(zip(first, a.shape, strict=True))
    sizes |= {name: size for name, size in zip(second, b.shape, strict=True) if sizes.get(name, 1) == 1}
    # Dims of size 1 are broadcast, those that are summed too.
    a, b = (_in_full(x, [sizes[each] for each in name]) for name, x in ((first, a), (second, b)))

    if is_sequence(a) and is_sequence(b) and (more := _beside_pairs(first, second, rows, columns, a, b)):
        (first, a), (second, b) = (_with_dims(name, x, more, sizes) for name, x in ((first, a), (second, b)))
        return _einsum_of_two(first, second, out, a, b)

    def matrices(x: Any, name: str, lines: list[str], across: list[str]) -> Any:
        order = [*batch, *lines, *across]
        x = x if list(name) == order else x.permute([name.index(each) for each in order])
        shape = [*(sizes[each] for each in batch), _count(lines, sizes), _count(across, sizes)]
        return x if list(x.shape) == shape else x.reshape(shape)

    result = matmul(matrices(a, first, rows, summed), matrices(b, second, summed, columns))
    if result is NO_RULE:
        return NO_RULE
    order = [*batch, *rows, *columns]
    shape = [sizes[each] for each in order]
    result = result if list(result.shape) == shape else result.reshape(shape)
    return result if list(out) == order else result.permute([order.index(each) for each in out])


def _in_full(x: Any, shape: list[int]) -> Any:
    return x if list(x.shape) == shape else x.expand(shape)


def _beside_pairs(
    first: str, second: str, rows: list[str], columns: list[str], a: SequenceTensor, b: SequenceTensor
) -> list[str]:
    """Return which dims beside the tokens number products of tokens with tokens, a biaffine layer's classes; none without pairs."""
    pair = first[a.placement.dim], second[b.placement.dim]
    return [each for each in (*rows, *columns) if each not in pair] if pair[0] in rows and pair[1] in columns else []


def _with_dims(name: str, x: Any, more: list[str], sizes: dict[str, int]) -> tuple[str, Any]:
    """Return a tensor repeated along the dims that it lacks, without memory."""
    for each in more:
        if each not in name:
            name, x = each + name, x.unsqueeze(0).expand(sizes[each], *x.shape)
    return name, x


def _count(names: list[str], sizes: dict[str, int]) -> int:
    count = 1
    for each in names:
        count *= sizes[each]
    return count


RULES: dict[str, Rule] = {
    **named("linear", linear),
    **named("matmul rmatmul bmm mm", product),
    **named("baddbmm", baddbmm),
    **named("bilinear", bilinear),
    **named(
        "solve_triangular inv inverse solve cholesky qr svd svdvals pinv lstsq matrix_exp matrix_power eigh eigvalsh",
        of_matrices,
    ),
    **named(
        "det slogdet logdet matrix_rank cholesky_solve cholesky_inverse solve_ex inv_ex cholesky_ex lu_factor lu",
        of_matrices,
    ),
    **named("tril triu", triangle),
    **named("cdist", distances),
    **named("tensordot", tensordot),
    **named("einsum", einsum),
}
