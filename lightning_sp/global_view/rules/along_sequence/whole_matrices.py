"""What goes by whole matrices whose rows or columns are tokens: each rank has those of some rows of the batch.

What it gives is split where a dim has as many numbers as there are tokens, else whole on every rank.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_sp.global_view.calls.call import NO_RULE, Call, Rule, named
from lightning_sp.global_view.exchange.lines import Lines, lines_of
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor


def of_whole_matrices(call: Call) -> Any:
    """Do what goes by whole matrices: two all-to-alls of the rows of the batch."""
    x = call.tensors[0]
    lead, own = x.dim() - 2, x.placement
    if lead < 0 or any(not _is_matrix(each, x) for each in call.tensors):
        return NO_RULE
    found = lines_of(x, range(lead))
    if found is None:
        return NO_RULE
    lines: Lines = found
    at = own.dim - x.dim()  # -2 or -1

    def part(value: Any) -> Any:
        if isinstance(value, SequenceTensor):
            some = lines_of(value, range(lead))
            assert some is not None
            return some.part if value.placement.dim == lead else some.part.movedim(1, -1)
        has_rows = isinstance(value, Tensor) and value.dim() > lead and value.shape[:lead] == x.shape[:lead]
        return lines.of_whole(value) if has_rows and lead else value

    def shown(each: Tensor) -> Any:
        if not each.dim() or len(each) != len(lines.part):
            return each  # what a function leaves empty
        for dim in (at, -3 - at):
            if each.dim() == 3 and each.shape[dim] == own.length:
                split = lines.split(each.movedim(dim, 1))
                local = split.local.movedim(lead, dim).contiguous()
                return SequenceTensor(local, split.placement.at(local.dim() + dim))
        return lines.whole(each)

    result = call.changed(part)
    if isinstance(result, Tensor):
        return shown(result)
    return type(result)([shown(each) if isinstance(each, Tensor) else each for each in result])


def _is_matrix(each: SequenceTensor, x: SequenceTensor) -> bool:
    own, lead = each.placement, x.dim() - 2
    rows = each.shape[:lead] == x.shape[:lead]
    return rows and lead <= own.dim and own.outer * own.inner == 1 and own.same_tokens(x.placement)


_NAMES = """
    inv inverse solve cholesky qr svd svdvals pinv lstsq matrix_exp matrix_power eigh eigvalsh eig eigvals det slogdet logdet matrix_rank
    matrix_norm cond solve_triangular cholesky_solve solve_ex inv_ex cholesky_ex cholesky_inverse lu_factor lu
"""
RULES: dict[str, Rule] = named(_NAMES, of_whole_matrices)
