"""Documents, tokenizers, the corpus in memory and `prepare`."""

import json
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_sp.errors import SequenceParallelError
from lightning_sp.text.corpus import CorpusView, MemoryCorpus, split_by_name
from lightning_sp.text.documents import Document, Documents
from lightning_sp.text.indexed_dataset import TokenFile
from lightning_sp.text.prepare import open_prepared, prepare
from lightning_sp.text.source import Source
from lightning_sp.text.tokenizer import load_tokenizer
from lightning_sp.text.unigram import held_out_perplexity


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_bytes(b"bb\xff")
    (tmp_path / "a.txt").write_bytes("aä".encode())
    (tmp_path / "deep" / "c.txt").write_bytes(b"cccc")
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n\n{"text": "three", "n": 3}\n', encoding="utf-8")
    table = pyarrow.table({"body": ["x", "yy", "zzz"]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    vocab = {"[UNK]": 0, "one": 1, "two": 2, "three": 3, "</s>": 4}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path_factory.mktemp("tokenizer") / "words.json"
    tokenizer.save(str(path))
    return path


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


def test_bytes_are_ids_and_256_ends_a_document():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode(b"\x00\xff").tolist() == [*tokenizer.encode("\x00").tolist(), 255] == [0, 255]
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    corpus = MemoryCorpus.from_documents([Document("a", "é"), Document("b", b"")], tokenizer)
    assert corpus.tokens.tolist() == [0xC3, 0xA9, 256, 256]
    assert corpus.sizes.tolist() == [3, 1]
    assert corpus.tokens.dtype == np.uint16


def test_a_tokenizers_file_and_a_hugging_face_folder_agree(tokenizer_file, tmp_path):
    PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), eos_token="</s>", unk_token="[UNK]").save_pretrained(
        tmp_path
    )
    for name in (str(tokenizer_file), str(tmp_path)):
        tokenizer = load_tokenizer(name)
        assert tokenizer.encode(b"two one four").tolist() == tokenizer.encode("two one four").tolist() == [2, 1, 0]
        assert (tokenizer.vocab_size, tokenizer.eos_id) == (5, 4)
        assert tokenizer.identity.startswith("sha256:")
    with pytest.raises(SequenceParallelError, match=r"document 'x' is not UTF-8 \(byte 1 of 3\)"):
        MemoryCorpus.from_documents([Document("x", b"a\xff\xff")], load_tokenizer(str(tokenizer_file)))


def test_unknown_tokenizers_are_refused_with_the_nearest(tokenizer_file, tmp_path):
    with pytest.raises(SequenceParallelError, match=r"'byte' is neither .*; did you mean 'bytes'"):
        load_tokenizer("byte")
    with pytest.raises(SequenceParallelError, match=r"did you mean '.*words\.json'"):
        load_tokenizer(str(tokenizer_file).replace("words", "word"))
    with pytest.raises(SequenceParallelError, match="no Hugging Face tokenizer in"):
        load_tokenizer(str(tmp_path))


def test_the_split_follows_names_alone():
    def held_out(num_documents: int, amount: int | float) -> set[str]:
        names = [f"doc{i}" for i in range(num_documents)]
        corpus = MemoryCorpus(np.arange(num_documents), [1] * num_documents, names)
        train, rest = split_by_name(corpus, amount)
        assert set(train.names) | set(rest.names) == set(names)
        assert not set(train.names) & set(rest.names)
        assert [int(train.read(i, 0, 1)[0]) for i in range(len(train.names))] == [int(n[3:]) for n in train.names]
        return set(rest.names)

    small, large = held_out(200, 0.1), held_out(400, 0.1)
    assert small == {name for name in large if int(name[3:]) < 200}  # adding documents moves no other
    assert 5 <= len(small) <= 40
    assert held_out(200, 0.0) == held_out(200, 0) == set()
    assert len(held_out(200, 7)) == 7
    with pytest.raises(SequenceParallelError, match=r"in \[0, 1\), got 1\.5"):
        held_out(5, 1.5)
    with pytest.raises(SequenceParallelError, match="at least one of the 5 documents to train on, got 5"):
        held_out(5, 5)


def test_the_unigram_perplexity_is_the_formulas():
    corpus = MemoryCorpus(np.array([0, 0, 1, 2, 0, 1]), [4, 2], ["train", "test"])
    train, test = CorpusView(corpus, np.array([0])), CorpusView(corpus, np.array([1]))
    # counts 2, 1, 1, 0 of 4 -> (3, 2, 2, 1) / 8; held out 0 and 1
    assert held_out_perplexity(train, test, 4) == pytest.approx((3 / 8 * 2 / 8) ** -0.5, rel=1e-12)
    with pytest.raises(SequenceParallelError, match="no held-out tokens"):
        held_out_perplexity(train, CorpusView(corpus, np.array([], dtype=np.int64)), 4)


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_prepare_writes_what_memory_would_hold(folder, kind, capfd):
    source, field = {
        "txt": (f"{folder}/**/*.txt", "text"),
        "jsonl": (f"{folder}/rows.jsonl", "text"),
        "parquet": (f"{folder}/rows.parquet", "body"),
    }[kind]
    written = prepare(source, folder / "out" / "tokens", field=field, minimum_bytes=2)
    memory = MemoryCorpus.from_documents(Documents(source, field=field, minimum_bytes=2), load_tokenizer("bytes"))
    prepared = open_prepared(folder / "out" / "tokens.idx", load_tokenizer("bytes"))
    assert list(prepared.names) == list(memory.names)
    assert prepared.sizes.tolist() == memory.sizes.tolist()
    assert [prepared.read(i, 0, int(n)).tolist() for i, n in enumerate(prepared.sizes)] == [
        memory.read(i, 0, int(n)).tolist() for i, n in enumerate(memory.sizes)
    ]
    assert written.num_documents == len(memory.sizes)
    assert written.num_tokens == len(memory.tokens) == written.num_bytes + written.num_documents
    assert written.num_left_out == (1 if kind == "parquet" else 0)
    assert f"{written.num_documents:,} documents, {written.num_tokens:,} tokens" in written.describe()
    assert "preparing" in capfd.readouterr().err
    assert sorted(p.name for p in (folder / "out").iterdir()) == ["tokens.bin", "tokens.idx", "tokens.idx.json"]


def test_prepare_counts_empty_documents_and_refuses_when_none_is_left(folder):
    (folder / "empty.txt").write_bytes(b"")
    assert prepare(f"{folder}/*.txt", folder / "tokens", progress=False).num_empty == 1
    with pytest.raises(SequenceParallelError, match=r"no document left .* 0 documents .* 3 shorter ones left out"):
        prepare(f"{folder}/*.txt", folder / "none", minimum_bytes=1000, progress=False)
    assert not list(folder.glob("none*"))


def test_prepared_files_of_another_tokenizer_or_description_are_refused(folder, tokenizer_file):
    prepare(f"{folder}/deep/*.txt", folder / "tokens", tokenizer=str(tokenizer_file), progress=False)
    with pytest.raises(SequenceParallelError, match=r"written with tokenizer sha256:.* the one given is bytes"):
        open_prepared(folder / "tokens", load_tokenizer("bytes"))
    description = folder / "tokens.idx.json"
    stale = json.loads(description.read_text()) | {"num_tokens": 99}
    description.write_text(json.dumps(stale))
    with pytest.raises(SequenceParallelError, match=r"describes 1 documents with 99 tokens, .* hold 1 with 2"):
        open_prepared(folder / "tokens", load_tokenizer(str(tokenizer_file)))
    description.unlink()
    assert isinstance(open_prepared(folder / "tokens", load_tokenizer("bytes")), TokenFile)


def test_the_cache_follows_the_files(folder):
    source = Source(f"{folder}/*.txt", cache_dir=str(folder / "cache"))
    with pytest.raises(SequenceParallelError, match=r"does not hold .* yet: call prepare_data"):
        source.open()
    assert "2 documents" in str(source.fill_cache())
    assert source.fill_cache() is None
    corpus, description = source.open()
    assert list(corpus.names) == ["a.txt", "b.txt"]
    assert "2 documents, 8 tokens" in description
    (folder / "b.txt").write_bytes(b"changed")
    assert source.fill_cache() is not None
    assert source.open()[0].sizes.tolist() == [4, 8]
    with pytest.raises(SequenceParallelError, match=r"minimum_bytes=5 .* give it to `lightning-sp prepare`"):
        Source(f"{folder}/x.idx", minimum_bytes=5).open()
