"""The split into training and held-out documents."""

import numpy as np
import pytest

from lightning_sp.errors import SequenceParallelError
from lightning_sp.text.corpus import MemoryCorpus, split_by_name


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
