"""Documents of files and tables, and sources that give none."""

import os
import sysconfig
from pathlib import Path

import pytest

from lightning_sp.errors import SequenceParallelError
from lightning_sp.text.corpus import MemoryCorpus, split_by_name
from lightning_sp.text.documents import Documents
from lightning_sp.text.tokenizer import load_tokenizer


def read(source, **options) -> dict[str, bytes | str]:
    return {document.name: document.data for document in Documents(source, **options)}


def test_files_are_documents_named_below_the_pattern(folder):
    assert read(f"{folder}/**/*.txt") == {"a.txt": "aä".encode(), "b.txt": b"bb\xff", "deep/c.txt": b"cccc"}
    assert list(read([f"{folder}/deep/*.txt", f"{folder}/a.txt"])) == ["a.txt", "c.txt"]
    (folder / "deep" / "a.txt").write_bytes(b"again")
    names = list(read([f"{folder}/a.txt", f"{folder}/deep/a.txt"]))
    assert names == sorted([f"{folder}/a.txt", f"{folder}/deep/a.txt"])  # equal names keep their folders


def test_tables_give_a_document_a_row(folder):
    assert read(f"{folder}/rows.jsonl") == {"rows.jsonl:1": "one", "rows.jsonl:3": "three"}
    assert read(f"{folder}/rows.parquet", field="body") == {
        f"rows.parquet:{i}": t for i, t in ((1, "x"), (2, "yy"), (3, "zzz"))
    }


def test_short_documents_are_left_out_and_counted(folder):
    documents = Documents(f"{folder}/**/*.txt", minimum_bytes=4)
    assert [d.name for d in documents] == ["deep/c.txt"]
    assert (documents.num_found, documents.num_kept) == (3, 1)
    assert documents.describe() == (
        f"1 documents of at least 4 bytes in 3 files of '{folder}/**/*.txt', 2 shorter ones left out"
    )


def test_the_standard_library_is_a_source(monkeypatch, tmp_path):
    documents = Documents("stdlib")
    root = Path(sysconfig.get_paths()["stdlib"])
    assert len(documents.files) >= 40
    assert "argparse.py" in dict(documents.files)
    assert all(path.suffix == ".py" and path.stat().st_size >= 32 * 1024 for _, path in documents.files)
    assert not any(
        {"site-packages", "dist-packages"} & set(path.relative_to(root).parts) for _, path in documents.files
    )
    for i in range(39):
        (tmp_path / f"{i}.py").write_bytes(b"#" * 40_000)
    (tmp_path / "short.py").write_bytes(b"#" * 32_767)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(
        SequenceParallelError, match=r"found 39 .py files of at least 32,768 bytes .* fewer than the 40"
    ):
        Documents("stdlib")


def test_sources_that_give_nothing_are_refused(folder):
    for source, options, match in (
        (f"{folder}/*.md", {}, r"\*\.md' matches no file"),
        (f"{folder}/aa.txt", {}, r"is no file; did you mean 'a\.txt'"),
        ("stdlb", {}, "is no file; did you mean 'stdlib'"),
        (str(folder), {}, r"is a folder: say which .*\*\*/\*\.txt"),
        ([f"{folder}/a.txt", f"{folder}/*.txt"], {}, r"lists '.*a\.txt' twice"),
        (
            f"{folder}/rows.jsonl",
            {"field": "txt"},
            r"line 1 has no text in field 'txt': it has \['text'\]; did you mean",
        ),
        (f"{folder}/rows.parquet", {"field": "bdy"}, r"no column 'bdy': it has \['body'\]; did you mean 'body'"),
    ):
        with pytest.raises(SequenceParallelError, match=match):
            read(source, **options)
    (folder / "bad.jsonl").write_text('{"text": "a"}\n{"text"', encoding="utf-8")
    with pytest.raises(SequenceParallelError, match=r"bad\.jsonl, line 2 is no JSON"):
        read(f"{folder}/bad.jsonl")


def test_files_that_are_not_what_their_name_says_are_refused_by_name(folder):
    (folder / "deep.jsonl").write_text('{"text": ' + "[" * 200_000 + "\n")
    (folder / "half.jsonl").write_text('{"text": "whole"}\n{"text": "a\\ud800b"}\n')
    (folder / "no.parquet").write_bytes(b"PAR1 no parquet")
    (folder / "short.parquet").write_bytes((folder / "rows.parquet").read_bytes()[:-20])
    for file, match in (
        ("deep.jsonl", r"deep\.jsonl, line 1 is no JSON: .*recursion"),
        ("half.jsonl", r"half\.jsonl, line 2 holds half of a character, \\ud800 at 1 of 3"),
        ("no.parquet", r"no\.parquet cannot be read as parquet: ArrowInvalid"),
        ("short.parquet", r"short\.parquet cannot be read as parquet: ArrowInvalid"),
    ):
        with pytest.raises(SequenceParallelError, match=match):
            read(f"{folder}/{file}")


def test_a_file_whose_name_is_no_text_can_be_held_out(folder):
    (folder / os.fsdecode(b"bad\xff.txt")).write_bytes(b"bytes")
    corpus = MemoryCorpus.from_documents(Documents(f"{folder}/*.txt"), load_tokenizer("bytes"))
    assert len(corpus.fingerprint()) == 32
    assert sum(len(view.sizes) for view in split_by_name(corpus, 1)) == 3


def test_a_file_that_cannot_be_read_is_named(folder):
    documents = Documents(f"{folder}/*.txt")
    (folder / "b.txt").unlink()
    with pytest.raises(SequenceParallelError, match=r"source .*b\.txt' cannot be read: FileNotFoundError"):
        list(documents)
