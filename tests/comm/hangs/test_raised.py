"""What a rank says of an error of its own."""

from __future__ import annotations

import re

import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_sp.comm.hangs.main_thread import Place, place_of_error
from lightning_sp.comm.hangs.raised import raised
from lightning_sp.errors import text_of, told_error

HERE = Place(collective="", line="me.py:3 in step", stack=("me.py:3 in step",))


class NoTextError(Exception):
    def __str__(self):
        raise LookupError("no text")


class OtherTextError(Exception):
    def __str__(self):
        return 5


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("one\ntwo"), "has raised ValueError: one, in me.py:3 in step"),
        (ValueError("\n\none"), "has raised ValueError: one, in me.py:3 in step"),
        (ValueError(), "has raised ValueError, in me.py:3 in step"),
        (SystemExit(0), "has raised SystemExit: 0, in me.py:3 in step"),
        (
            ValueError("a" * 1001),
            f"has raised ValueError: {'a' * 1000}... (1 letters more in that rank's own traceback), ",
        ),
        # Both would leave the others waiting: the one has no text, the other none that a store takes.
        (NoTextError(), "has raised NoTextError: (its __str__ has raised LookupError), in me.py:3 in step"),
        (OtherTextError(), "has raised OtherTextError: (its __str__ has raised TypeError), in me.py:3 in step"),
        (OSError("no file b\udcff"), "has raised OSError: no file b\\udcff, in me.py:3 in step"),
    ],
)
def test_an_error_is_one_line_with_the_users_line(error, said):
    assert raised(error, HERE).startswith(said)


def test_a_text_that_fails_has_its_class_all_the_same():
    assert text_of(NoTextError()) == "(its __str__ has raised LookupError)"
    assert told_error(NoTextError()) == "NoTextError: (its __str__ has raised LookupError)"
    assert told_error(OSError("no")) == "OSError: no"


class Samples(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise OSError("cannot read sample 2\n  of 4")
        return index


def test_an_error_of_a_loaders_worker_is_that_of_its_line():
    """torch's own first line says only that there was one."""
    with pytest.raises(OSError, match="sample 2") as caught:
        list(DataLoader(Samples(), num_workers=1))
    said = raised(caught.value, place_of_error(caught.value))
    assert said.startswith(
        "has raised OSError: Caught OSError in DataLoader worker process 0. OSError: cannot read sample 2 (tests/comm/"
    )
    assert re.search(r"test_raised\.py:\d+ in __getitem__\), in ", said)


def test_an_error_without_a_line_of_a_loaders_worker_has_its_text():
    error = OSError("Caught OSError in DataLoader worker process 0.\nOriginal OSError: no room")
    said = "has raised OSError: Caught OSError in DataLoader worker process 0. Original OSError: no room, in me.py:3"
    assert raised(error, HERE).startswith(said)
