import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sp.errors import SequenceParallelError
from lightning_sp.text.indexed_dataset import TokenFile
from lightning_sp.text.indexed_dataset_writer import TokenFileWriter
from lightning_sp.text.tokenizer import token_dtype


def pack_by_hand(
    prefix, sizes, tokens, *, code=8, char="H", marks=None, magic=b"MMIDIDX\x00\x00", version=1, pointers=None
):
    """Write the two files with struct alone, from Megatron-LM's description of them."""
    width = struct.calcsize("<" + char)
    marks = list(range(len(sizes) + 1)) if marks is None else marks
    pointers = [sum(sizes[:i]) * width for i in range(len(sizes))] if pointers is None else pointers
    index = magic + struct.pack("<Q", version) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sizes)) + struct.pack("<Q", len(marks))
    index += b"".join(struct.pack("<i", size) for size in sizes)
    index += b"".join(struct.pack("<q", pointer) for pointer in pointers)
    index += b"".join(struct.pack("<q", mark) for mark in marks)
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(struct.pack(f"<{len(tokens)}{char}", *tokens))


def documents_of(file: TokenFile) -> list[list[int]]:
    return [file.read(d, 0, int(size)).tolist() for d, size in enumerate(file.sizes)]


@pytest.mark.parametrize(
    ("code", "char", "dtype"),
    [(1, "B", "uint8"), (2, "b", "int8"), (3, "h", "int16"), (4, "i", "int32"), (5, "q", "int64"), (8, "H", "uint16")],
)
def test_both_directions_agree_with_files_packed_by_hand(tmp_path, code, char, dtype):
    pack_by_hand(tmp_path / "hand", [3, 1, 4], [7, 8, 9, 1, 2, 3, 4, 127], code=code, char=char)
    read = TokenFile(tmp_path / "hand")
    assert documents_of(read) == [[7, 8, 9], [1], [2, 3, 4, 127]]
    assert read.read(2, 1, 3).tolist() == [3, 4]
    assert (read.num_tokens, read.dtype, list(read.names)) == (8, np.dtype(dtype), ["0", "1", "2"])
    with TokenFileWriter(tmp_path / "ours", np.dtype(dtype)) as writer:
        for document in documents_of(read):
            writer.add(np.array(document))
    assert (writer.num_documents, writer.num_tokens) == (3, 8)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / "ours").with_suffix(suffix).read_bytes() == (tmp_path / "hand").with_suffix(
            suffix
        ).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hand.bin", "hand.idx", "ours.bin", "ours.idx"]


def test_a_document_may_be_several_sequences(tmp_path):
    pack_by_hand(tmp_path / "x", [3, 1, 4], list(range(8)), marks=[0, 2, 2, 3])
    for path in ("x", "x.idx", "x.bin"):
        assert documents_of(TokenFile(tmp_path / path)) == [[0, 1, 2, 3], [], [4, 5, 6, 7]]


@settings(deadline=None)
@given(documents=st.lists(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=9), max_size=6))
def test_any_documents_come_back(tmp_path_factory, documents):
    prefix = tmp_path_factory.mktemp("tokens") / "x"
    with TokenFileWriter(prefix, token_dtype(65_499)) as writer:
        for document in documents:
            writer.add(np.array(document))
    file = TokenFile(prefix)
    assert documents_of(file) == documents
    assert documents_of(pickle.loads(pickle.dumps(file))) == documents


DAMAGES = {
    "magic": (dict(magic=b"MMIDIDY\x00\x00"), r"begins with b'MMIDIDY.*token index with b'MMIDIDX"),
    "version": (dict(version=2), "has version 2, known is 1"),
    "dtype code": (dict(code=9), "has dtype code 9"),
    "floats": (dict(code=7), "has dtype code 7, token ids have one of .*8: 'uint16'"),
    "width": (dict(code=4, pointers=[0, 12, 16]), r"x\.bin' has 16 bytes, its index describes 8 tokens of int32 = 32"),
    "pointers": (dict(pointers=[0, 6, 10]), "points sequence 2 to byte 10, the sizes before it end at 8"),
    "pointers fall": (dict(pointers=[0, 6, 2]), "points sequence 2 to byte 2"),
    "marks end": (dict(marks=[0, 1, 2]), r"has document marks \[0, 1, 2\] .* rise from 0 to its 3 sequences"),
    "marks fall": (dict(marks=[0, 2, 1, 3]), r"document marks \[0, 2, 1\]"),
    "no marks": (dict(marks=[]), r"document marks \[\]"),
    "negative size": (dict(sizes=[3, -1, 6]), "gives sequence 1 a size of -1"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_contradicts_itself_is_refused(tmp_path, damage):
    changed, match = DAMAGES[damage]
    pack_by_hand(tmp_path / "x", **({"sizes": [3, 1, 4], "tokens": range(8)} | changed))
    with pytest.raises(SequenceParallelError, match=match):
        TokenFile(tmp_path / "x")


@pytest.mark.parametrize(
    ("suffix", "cut", "match"),
    [
        (".bin", 15, r"x\.bin' has 15 bytes, its index describes 8 tokens of uint16 = 16"),
        (".bin", 0, r"x\.bin' has 0 bytes"),
        (".idx", 33, r"x\.idx' has 33 bytes, fewer than the 34 of its header"),
        (".idx", 101, r"x\.idx' has 101 bytes, 3 sequences and 4 document marks need 102"),
        (".idx", 34, r"x\.idx' has 34 bytes, 3 sequences"),
    ],
)
def test_a_truncated_file_is_refused_with_both_sizes(tmp_path, suffix, cut, match):
    pack_by_hand(tmp_path / "x", [3, 1, 4], range(8))
    path = (tmp_path / "x").with_suffix(suffix)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(SequenceParallelError, match=match):
        TokenFile(tmp_path / "x")


def test_too_long_missing_and_multimodal_files_are_refused(tmp_path):
    pack_by_hand(tmp_path / "x", [3, 1, 4], range(9))
    with pytest.raises(SequenceParallelError, match="has 18 bytes, its index describes 8 tokens"):
        TokenFile(tmp_path / "x")
    pack_by_hand(tmp_path / "x", [3, 1, 4], range(8))
    index = tmp_path / "x.idx"
    index.write_bytes(index.read_bytes() + b"\0\0\0")
    with pytest.raises(SequenceParallelError, match=r"3 sequence modes .* multimodal"):
        TokenFile(tmp_path / "x")
    with pytest.raises(SequenceParallelError, match=r"nowhere\.idx' does not exist"):
        TokenFile(tmp_path / "nowhere")
    (tmp_path / "x.bin").unlink()
    with pytest.raises(SequenceParallelError, match=r"x\.bin' does not exist"):
        TokenFile(tmp_path / "x")


def test_an_interrupted_writer_leaves_the_older_file_and_nothing_else(tmp_path):
    pack_by_hand(tmp_path / "x", [3], [1, 2, 3])
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def interrupted():
        with TokenFileWriter(tmp_path / "x", np.uint16) as writer:
            writer.add(np.arange(100))
            assert (tmp_path / "x.idx").read_bytes() == before["x.idx"]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    with TokenFileWriter(tmp_path / "x", np.uint16) as writer:
        writer.add(np.array([5, 6]))
    assert documents_of(TokenFile(tmp_path / "x")) == [[5, 6]]


def test_the_writer_refuses_what_the_format_cannot_hold(tmp_path):
    with pytest.raises(SequenceParallelError, match="dtype float32 cannot be stored"):
        TokenFileWriter(tmp_path / "x", np.float32)
    too_long = np.broadcast_to(np.uint8(0), 2**31)
    for tokens, match in (
        (np.array([65_536]), "document 0 has ids from 65536 to 65536, uint16 holds 0 to 65535"),
        (np.array([3, -1]), "ids from -1 to 3"),
        (np.array([], dtype=np.int64), "document 0 has 0 tokens; the format stores 1 to 2147483647"),
        (too_long, "document 0 has 2147483648 tokens"),
    ):
        with (
            pytest.raises(SequenceParallelError, match=match),
            TokenFileWriter(tmp_path / "x", np.uint16) as writer,
        ):
            writer.add(tokens)
    assert list(tmp_path.iterdir()) == []


def test_the_fingerprint_follows_tokens_and_sizes(tmp_path):
    prints = set()
    for sizes, tokens in (([3, 1], [1, 2, 3, 4]), ([2, 2], [1, 2, 3, 4]), ([3, 1], [1, 2, 3, 5])):
        pack_by_hand(tmp_path / "x", sizes, tokens)
        prints |= {TokenFile(tmp_path / "x").fingerprint(), TokenFile(tmp_path / "x").fingerprint()}
    assert len(prints) == 3
    with pytest.raises(SequenceParallelError, match="1 names were given for 2 documents"):
        TokenFile(tmp_path / "x", ["a"])


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(257, "uint16"), (65_499, "uint16"), (65_500, "int32"), (200_000, "int32")]
)
def test_the_dtype_is_megatrons_choice(vocab_size, dtype):
    assert token_dtype(vocab_size) == np.dtype(dtype)
