"""What a loss' targets are of, in the global view: the tensor tells, and never their number alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_sp.loss.targets import kind_in_global_view

ROWS, CHAT, CODE = 2, 16, 8


def context() -> Any:
    """Return that of a step whose batch holds two sequences, on ranks that have half of each."""
    sequences = [SimpleNamespace(rows=ROWS, length=length) for length in (CHAT, CODE)]
    return SimpleNamespace(loss_step=SimpleNamespace(batch=SimpleNamespace(rows=ROWS, all_sequences=sequences)))


def placement(length: int, *, of_chosen: bool = False) -> Any:
    return SimpleNamespace(
        storage=SimpleNamespace(root=object() if of_chosen else None, local_tokens=length // 2), inner=1
    )


@pytest.mark.parametrize(
    ("count", "of", "kind"),
    [
        # 8 tokens of this rank, as many as it has of one row of the other sequence.
        (ROWS * CODE // 2, placement(CODE), "tokens"),
        (ROWS * CHAT // 2, placement(CHAT), "tokens"),
        (CHAT // 2, placement(CHAT), "row"),
        (CODE // 2, placement(CODE), "row"),
        # Chosen tokens of all rows, one after the other.
        (CHAT // 2, placement(CHAT, of_chosen=True), "tokens"),
        # What all ranks have alike.
        (ROWS, None, "rows"),
        (ROWS * CHAT // 2, None, "row"),
        (ROWS * CHAT, None, "rows"),
    ],
)  # fmt: skip
def test_the_tensor_tells_what_its_targets_are_of(count: int, of: Any, kind: str) -> None:
    assert kind_in_global_view(torch.zeros(count, dtype=torch.int64), context(), of) == kind
