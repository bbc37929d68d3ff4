"""A source's cache follows its files."""

import pytest

from lightning_sp.errors import SequenceParallelError
from lightning_sp.text.source import Source


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
