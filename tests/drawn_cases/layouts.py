"""Layouts drawn for every test of attention and layout: any ranges, equally many tokens on each ring rank."""

from __future__ import annotations

from hypothesis import strategies as st

from lightning_sp.layout import SequenceLayout


@st.composite
def drawn(draw: st.DrawFn, ring: int, ulysses: int, length: int, most: int = 12) -> SequenceLayout:
    """Draw a layout for a length that the degrees divide: up to `most` ranges here and there, the rest where there is room."""
    room = [length // ring] * ring
    held: list[list[tuple[int, int]]] = [[] for _ in range(ring)]
    steps = st.tuples(st.integers(0, ring - 1), st.integers(1, max(1, length // ring)))
    wanted = draw(st.lists(steps, max_size=most))
    place = 0
    for rank, tokens in [*wanted, *((rank, length) for rank in range(ring))]:
        end = place + min(tokens, room[rank])
        if end > place:
            held[rank].append((place, end))
            room[rank] -= end - place
            place = end
    return SequenceLayout(ring, ulysses, tuple(map(tuple, held)))
