"""A folder of texts and a tokenizer of words."""

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers


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
