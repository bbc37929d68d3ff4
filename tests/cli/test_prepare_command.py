"""`lightning-sp prepare` writes token files, or says in one line why not."""

import sys

from lightning_sp import cli
from lightning_sp.text import TokenFile
from tests.cli.test_lightning_command import run_main


def test_cli_prepares_token_files(monkeypatch, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("hello")
    monkeypatch.setattr(
        sys, "argv", ["lightning-sp", "prepare", str(tmp_path / "a.txt"), "--output", str(tmp_path / "t")]
    )
    cli.main()
    assert "1 documents, 6 tokens from 5 bytes" in capsys.readouterr().out
    assert TokenFile(tmp_path / "t.idx").read(0, 0, 6).tolist() == [*b"hello", 256]


def test_cli_prepare_refuses_in_one_line(monkeypatch, tmp_path, capsys):
    assert run_main(monkeypatch, "prepare", str(tmp_path / "none.txt"), "--output", str(tmp_path / "t")) == 1
    error = capsys.readouterr().err
    assert error.startswith("lightning-sp prepare: ")
    assert "none.txt" in error
