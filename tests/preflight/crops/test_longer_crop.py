"""How long a longer crop is, and that groups of neighbouring tokens are cut by it where the sequence's pieces cut them."""

from __future__ import annotations

import pytest

from lightning_sp.layout import SequenceLayout
from lightning_sp.preflight.crops.crop import longer_tokens

LAYOUTS = [SequenceLayout(2, 1), SequenceLayout(1, 2), SequenceLayout(2, 2), SequenceLayout(8, 1), SequenceLayout(3, 2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: f"{each.ring_size}x{each.ulysses_size}")
@pytest.mark.parametrize("length", [2052, 5000, 8192, 100_001])
def test_its_pieces_leave_the_rest_of_the_sequences(layout, length):
    whole = layout.padded_length(length)
    tokens = longer_tokens(1, length, layout, least=1024)
    most = max(whole // layout.size, 1024)
    assert tokens % layout.multiple == 0
    assert most / 2 <= tokens + layout.multiple
    assert tokens <= most
    differ = (whole - tokens) // layout.multiple
    for group in (2, 4, 8, 16):
        assert differ % group == 0, f"groups of {group}: {tokens} for {whole} tokens"
    if most // layout.multiple >= 480:
        assert differ % 240 == 0, f"groups of 3 and 5: {tokens} for {whole} tokens"


def test_it_is_the_whole_where_that_is_affordable():
    ring = SequenceLayout(2, 1)
    assert longer_tokens(1, 1022, ring, least=1024) == 1024
    assert longer_tokens(4, 8192, ring, least=1024) == 8192
    # With checkpoints alone a step affords more than the least; 224 pieces of 4 tokens are 2,048 of them, but for 38 times 48.
    assert longer_tokens(0, 8192, ring, least=1024) == 896
