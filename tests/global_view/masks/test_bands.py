"""Which whole masks are known again as bands, and that no other is."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_sp.global_view.masks import bands
from lightning_sp.global_view.masks.bands import band_of

S = 12
PLACES = torch.arange(S)
DISTANCE = PLACES[:, None] - PLACES[None, :]
PADDED = torch.arange(S) < torch.tensor([[S], [S - 3]])
LEFT_PADDED = torch.arange(S) >= torch.tensor([[0], [4]])
KNOWN = {
    "tril": (torch.tril(torch.ones(S, S)) != 0, (None, 0, False)),
    "arange": (DISTANCE >= 0, (None, 0, False)),
    "triu of -inf": (torch.triu(torch.full((S, S), -torch.inf), 1), (None, 0, False)),
    "triu of the lowest": (torch.triu(torch.full((S, S), torch.finfo(torch.float32).min), 1), (None, 0, False)),
    "torch's": (nn.Transformer.generate_square_subsequent_mask(S), (None, 0, False)),
    "window": ((DISTANCE >= 0) & (DISTANCE < 5), (4, 0, False)),
    "window of both sides": (DISTANCE.abs() < 3, (2, 2, False)),
    "window, added": (torch.where((DISTANCE >= 0) & (DISTANCE < 5), 0.0, -torch.inf), (4, 0, False)),
    "the query alone": (DISTANCE == 0, (0, 0, False)),
    "all": (torch.ones(S, S, dtype=torch.bool), (None, None, False)),
    "causal and padding": ((DISTANCE >= 0) & PADDED[:, None, None], (None, 0, True)),
    "causal and padding in front": ((DISTANCE >= 0) & LEFT_PADDED[:, None, None], (None, 0, True)),
}
_HOLE = DISTANCE >= 0
OTHERS = {
    "one key hidden": _HOLE & ~((PLACES[:, None] == 7) & (PLACES == 3)),
    "one key shown": _HOLE | ((PLACES[:, None] == 5) & (PLACES == 9)),
    "without the query": DISTANCE > 0,
    "of each head": torch.stack([_HOLE, ~_HOLE.mT])[None],
    "blocks": (PLACES[:, None] // 4) == (PLACES // 4),
    "a slope": torch.where(DISTANCE >= 0, 0.1 * DISTANCE, -torch.inf),
    "a number that may not hide": torch.triu(torch.full((S, S), -100.0), 1),
    "learned": torch.triu(torch.full((S, S), -torch.inf), 1).requires_grad_(),
    "of rows apart": torch.stack([_HOLE, _HOLE.mT])[:, None],
}


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that is made, of other memory than one's."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.given, self.numel = given.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
        own = [each.numel() for each in made if each.untyped_storage().data_ptr() != self.given]
        self.numel = max([self.numel, *own])
        return output


def of_four(mask):
    return mask[(None,) * (4 - mask.dim())]


@pytest.mark.parametrize("rows", [5, 256])
@pytest.mark.parametrize("name", KNOWN)
def test_a_band_is_known_some_rows_at_a_time(monkeypatch, name, rows):
    monkeypatch.setattr(bands, "_ROWS", rows)
    mask, (before, after, has_keys) = KNOWN[name]
    found = band_of(of_four(mask))
    assert found is not None
    assert (found.before, found.after, found.keys is not None) == (before, after, has_keys)
    if has_keys:
        assert torch.equal((DISTANCE >= 0) & found.keys, of_four(mask))


@pytest.mark.parametrize("name", OTHERS)
def test_another_mask_stays_a_matrix(monkeypatch, name):
    monkeypatch.setattr(bands, "_ROWS", 5)
    assert band_of(of_four(OTHERS[name])) is None


def test_nothing_of_the_masks_size_is_made():
    mask = torch.ones(1, 1, 1024, 1024, dtype=torch.bool).tril()
    with Largest(mask) as largest:
        assert band_of(mask) is not None
    assert largest.numel <= 256 * 1024
