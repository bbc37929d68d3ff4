"""Modules with weights of their own, as users and other libraries write them: outputs, gradients and buffers of one device."""

from __future__ import annotations

import pytest

from tests.global_view import module_ranks as ranks
from tests.global_view.models.library_blocks import BLOCKS, LIBRARIES, is_there

OWN = sorted(ranks.MODULES.keys() - BLOCKS.keys())
LAYOUTS = [(1, 2, 13), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 1, 16), (2, 2, 13)))]


def check(pools, names, length, ulysses, ring, compiled=False):
    for answers in pools(ulysses * ring).run(ranks.modules, names, length, ulysses, ring, compiled):
        found = dict(zip(names, answers, strict=True))
        assert {name: each for name, each in found.items() if isinstance(each, str)} == {}
        assert {name: each for name, each in found.items() if max(each.values()) > 1e-10} == {}


@pytest.mark.filterwarnings("ignore:torch flash")
@pytest.mark.parametrize(("ulysses", "ring", "length"), LAYOUTS)
def test_modules_that_users_write_are_exact(pools, ulysses, ring, length):
    check(pools, OWN, length, ulysses, ring)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, len(OWN), 5))
def test_modules_that_users_write_are_exact_where_they_are_compiled(pools, first):
    for name in OWN[first : first + 5]:
        check(pools, [name], 16, 1, 2, compiled=True)


@pytest.mark.parametrize(("ulysses", "ring", "length"), [(1, 2, 13), (2, 1, 16), (2, 2, 13)])
@pytest.mark.parametrize("library", LIBRARIES)
def test_blocks_of_other_libraries_are_exact(pools, library, ulysses, ring, length):
    if not is_there(library):
        pytest.skip(f"{library} is not installed: python -m tools.library_blocks {library} does, and runs this")
    check(pools, [name for name in BLOCKS if name.startswith(library)], length, ulysses, ring)
