"""Token files that change after they were written: flipped bits and a file that is cut short are named, never read over."""

import os
import pickle

import numpy as np
import pytest

from lightning_sp.errors import SequenceParallelError
from lightning_sp.text.checked_file import BLOCK_BYTES, BlockChecksums, CheckedFile
from lightning_sp.text.indexed_dataset import TokenFile
from lightning_sp.text.prepare import open_prepared, prepare
from lightning_sp.text.tokenizer import load_tokenizer


@pytest.fixture
def prepared(tmp_path):
    """Two documents, the second over three blocks."""
    (tmp_path / "a.txt").write_bytes(b"short")
    (tmp_path / "b.txt").write_bytes(np.random.default_rng(0).bytes(BLOCK_BYTES + 1000))
    prepare(str(tmp_path / "*.txt"), tmp_path / "x", progress=False)
    return tmp_path / "x"


def opened(prefix):
    return open_prepared(prefix, load_tokenizer("bytes"))


def flip(path, byte, bit=0):
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("part", [1, 3, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 5])
def test_checksums_do_not_depend_on_how_a_file_is_written(part):
    data, checksums = os.urandom(3 * BLOCK_BYTES + 7)[: 20 * part], BlockChecksums()
    for start in range(0, len(data), part):
        checksums.add(data[start : start + part])
    whole = BlockChecksums()
    whole.add(data)
    assert checksums.of_all() == whole.of_all()
    assert len(whole.of_all()) == -(-len(data) // BLOCK_BYTES)


def test_what_was_prepared_is_read_across_blocks_and_in_a_worker(prepared):
    wanted = np.frombuffer((prepared.parent / "b.txt").read_bytes(), np.uint8)
    for file in (opened(prepared), pickle.loads(pickle.dumps(opened(prepared)))):
        assert (
            file.read(1, BLOCK_BYTES // 2 - 9, BLOCK_BYTES // 2 + 9).tolist()
            == wanted[BLOCK_BYTES // 2 - 9 : BLOCK_BYTES // 2 + 9].tolist()
        )
        assert file.read(1, 0, len(wanted)).tolist() == wanted.tolist()
        assert file.read(0, 3, 99).tolist() == [*b"rt", 256]
        assert len(file.read(0, 2, 2)) == 0


def test_a_flipped_bit_of_the_tokens_is_found_where_it_is_read(prepared):
    flip(prepared.with_suffix(".bin"), BLOCK_BYTES + 77)
    file = opened(prepared)
    file.read(0, 0, 6)
    with pytest.raises(SequenceParallelError, match=rf"x\.bin' is damaged: bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES}"):
        file.read(1, 0, BLOCK_BYTES)


@pytest.mark.parametrize("byte", [40, 60, -6])
def test_a_flipped_bit_of_the_index_is_found_when_it_is_opened(prepared, byte):
    # A document mark among them, which would still rise: 6 bytes from the end is the high part of the last one.
    flip(prepared.with_suffix(".idx"), byte)
    with pytest.raises(
        SequenceParallelError, match=r"has not the checksum|points|has document marks|gives|its index describes"
    ):
        opened(prepared)


def test_a_mark_that_moved_within_its_limits_is_found(tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(name * 5)
    prepare(str(tmp_path / "*.txt"), tmp_path / "x", progress=False)
    # Marks 0 1 2 3 4: the second becomes 0, and the files still agree with themselves.
    flip(tmp_path / "x.idx", -32)
    assert TokenFile(tmp_path / "x").sizes.tolist() == [0, 12, 6, 6]
    with pytest.raises(SequenceParallelError, match="has not the checksum that it was written with"):
        opened(tmp_path / "x")


def test_a_description_that_changed_is_found(prepared):
    description = prepared.with_name("x.idx.json")
    whole = description.read_text()
    description.write_text(whole.replace("b.txt", "c.txt"))
    with pytest.raises(SequenceParallelError, match=r"idx\.json' is damaged: it has not the checksum"):
        opened(prepared)
    for damage in ("", "[]", "{}", whole[:-9], "[" * 100_000, whole.replace('"names": [', '"names": [1, ')):
        description.write_text(damage)
        with pytest.raises(SequenceParallelError, match=r"idx\.json' is damaged, or no description"):
            opened(prepared)
    description.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(SequenceParallelError, match=r"idx\.json' is damaged"):
        opened(prepared)


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error_and_no_signal(prepared):
    file = opened(prepared)
    os.truncate(prepared.with_suffix(".bin"), 4096)
    with pytest.raises(SequenceParallelError, match=r"x\.bin' ends at byte 4096, it had \d+ when it was opened"):
        file.read(1, 0, 10_000)


def test_checksums_of_another_size_and_files_that_cannot_be_opened_are_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"1234")
    with pytest.raises(SequenceParallelError, match=r"has 4 bytes, 1 blocks; .* checksums of 2"):
        CheckedFile(tmp_path / "x", 4, [1, 2])
    with pytest.raises(SequenceParallelError, match="cannot be opened"):
        CheckedFile(tmp_path / "y", 4)
    with pytest.raises(SequenceParallelError, match=r"cannot be read at byte 0: .*directory"):
        CheckedFile(tmp_path, 4).read(0, 4)


def test_tokens_that_cannot_be_written_are_refused_by_name(prepared, tmp_path):
    before = sorted(each.name for each in tmp_path.iterdir())
    with pytest.raises(
        SequenceParallelError, match=r"token file .* could not be written: .*File exists|Not a directory"
    ):
        prepare(str(tmp_path / "a.txt"), tmp_path / "b.txt" / "x", progress=False)
    assert sorted(each.name for each in tmp_path.iterdir()) == before
