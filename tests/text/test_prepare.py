"""Prepared token files hold what memory would hold, and are refused where they are stale."""

import json

import pytest

from lightning_sp.errors import SequenceParallelError
from lightning_sp.text.corpus import MemoryCorpus
from lightning_sp.text.documents import Documents
from lightning_sp.text.indexed_dataset import TokenFile
from lightning_sp.text.prepare import open_prepared, prepare
from lightning_sp.text.tokenizer import load_tokenizer


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
