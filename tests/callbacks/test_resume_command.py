"""Paths in what is to be copied are relative to the current folder."""

import pytest

from lightning_sp.callbacks.resume_command import shorten_paths


@pytest.mark.parametrize(
    ("text", "shortened"),
    [
        ("/a/b/c", "c"),
        ("/a/b", "/a/b"),
        ("/a/bc/d", "/a/bc/d"),
        ("/x/a/b/c", "/x/a/b/c"),
        ("python /a/b/train.py 'k=[/a/b/x,/a/b/y z]'", "python train.py 'k=[x,y z]'"),
        ("fit(ckpt_path='/a/b/c')", "fit(ckpt_path='c')"),
        ("cd /a/b/ there", "cd /a/b/ there"),
    ],
)
def test_paths_are_shortened_where_they_begin(text, shortened):
    assert shorten_paths(text, "/a/b") == shortened
    assert shorten_paths(text, "/a/b/") == shortened
