import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sp.errors import SequenceParallelError
from lightning_sp.labels import IGNORE_INDEX
from lightning_sp.text.corpus import MemoryCorpus
from lightning_sp.text.windows import Windows

PAD = 99_999
sizes_of_documents = st.lists(st.integers(0, 23), min_size=1, max_size=8)
lengths = st.integers(1, 9)


def corpus_of(sizes: list[int]) -> MemoryCorpus:
    """Tokens that tell where they are: 100 * (document + 1) + place."""
    tokens = [100 * (d + 1) + t for d, size in enumerate(sizes) for t in range(size)]
    return MemoryCorpus(np.array(tokens, dtype=np.int32), sizes, [f"d{d}" for d in range(len(sizes))])


def check_sample(sample: dict[str, torch.Tensor], length: int) -> list[tuple[int, int]]:
    """Check what holds for every sample and return its (input, target) pairs."""
    assert set(sample) == {"input_ids", "shift_labels", "labels", "position_ids"}
    assert all(t.shape == (length,) and t.dtype == torch.int64 for t in sample.values())
    assert sample["labels"][0] == IGNORE_INDEX
    assert torch.equal(sample["labels"][1:], sample["shift_labels"][:-1])
    inputs, targets, positions = (sample[k].tolist() for k in ("input_ids", "shift_labels", "position_ids"))
    assert positions[0] == 0
    for t in range(length):
        new_document = t > 0 and (inputs[t] != inputs[t - 1] + 1) and not (inputs[t] == inputs[t - 1] == PAD)
        assert positions[t] == (0 if t == 0 or new_document else positions[t - 1] + 1)
        assert targets[t] in (IGNORE_INDEX, inputs[t] + 1)  # never across documents
        if t + 1 < length and targets[t] == IGNORE_INDEX:
            assert positions[t + 1] == 0 or inputs[t] == PAD
    assert all(target == IGNORE_INDEX for i, target in zip(inputs, targets, strict=True) if i == PAD)
    return list(zip(inputs, targets, strict=True))


@pytest.mark.parametrize("remainder", ["drop", "pad"])
@pytest.mark.parametrize("packing", ["document", "packed"])
@settings(deadline=None)
@given(sizes=sizes_of_documents, length=lengths)
def test_windows_cover_what_they_say(sizes, length, packing, remainder):
    windows = Windows(corpus_of(sizes), length, packing=packing, remainder=remainder, pad_id=PAD)
    pairs = [pair for i in range(len(windows)) for pair in check_sample(windows[i], length)]
    all_targets = [100 * (d + 1) + t for d, size in enumerate(sizes) for t in range(1, size)]
    targets = [target for _, target in pairs if target != IGNORE_INDEX]
    assert sorted(set(targets)) == sorted(targets)  # no target twice
    assert windows.num_targets == len(all_targets)
    assert windows.num_dropped_targets == len(all_targets) - len(targets)
    assert windows.num_padded_positions == sum(i == PAD for i, _ in pairs)
    if remainder == "pad":
        assert targets == all_targets
    elif packing == "packed":
        assert targets == [t for i, t in enumerate_stream(sizes, len(windows) * length) if t is not None]
    else:
        assert len(windows) == sum(max(0, size - 1) // length for size in sizes)


def enumerate_stream(sizes: list[int], stop: int) -> list[tuple[int, int | None]]:
    stream = [
        (100 * (d + 1) + t, 100 * (d + 1) + t + 1 if t + 1 < n else None) for d, n in enumerate(sizes) for t in range(n)
    ]
    return stream[:stop]


def test_one_of_each_by_hand():
    corpus = corpus_of([6, 3, 0, 5])
    document = Windows(corpus, 4, packing="document", remainder="pad", pad_id=PAD)
    assert [w["input_ids"].tolist() for w in map(document.__getitem__, range(len(document)))] == [
        [100, 101, 102, 103], [104, PAD, PAD, PAD], [200, 201, PAD, PAD], [400, 401, 402, 403],
    ]  # fmt: skip
    assert document[1]["shift_labels"].tolist() == [105, -100, -100, -100]
    assert document[1]["position_ids"].tolist() == [0, 0, 1, 2]
    packed = Windows(corpus, 4, packing="packed", remainder="drop")
    assert packed[1]["input_ids"].tolist() == [104, 105, 200, 201]
    assert packed[1]["shift_labels"].tolist() == [105, -100, 201, 202]
    assert packed[1]["position_ids"].tolist() == [0, 1, 0, 1]
    assert packed[1]["labels"].tolist() == [-100, 105, -100, 201]
    assert packed.describe() == (
        "3 windows of 4 tokens from 4 documents (packing='packed'), 1 of 11 targets dropped (remainder='drop')"
    )
    assert "4 windows of 4 tokens" in document.describe()
    assert "5 positions padded for 11 targets (remainder='pad')" in document.describe()


def test_windows_read_only_what_they_need():
    class Counting(MemoryCorpus):
        num_read = 0

        def read(self, document, start, stop):
            self.num_read += stop - start
            return super().read(document, start, stop)

    corpus = Counting(np.zeros(100_000, dtype=np.uint16), [100_000], ["long"])
    windows = Windows(corpus, 10)
    windows[5000]
    assert corpus.num_read == 11


@pytest.mark.parametrize("packing", ["document", "packed"])
def test_documents_of_no_one_and_ten_million_tokens(packing):
    sizes = [0, 1, 10_000_000]
    corpus = MemoryCorpus(np.arange(sum(sizes), dtype=np.int32), sizes, ["none", "one", "long"])
    windows = Windows(corpus, 4096, packing=packing)
    assert len(windows) == 9_999_999 // 4096
    assert windows.num_targets == 9_999_999
    last = windows[len(windows) - 1]
    first = 4096 * (len(windows) - 1) + (packing == "document")  # after the document of one token
    assert last["input_ids"].tolist() == list(range(first, first + 4096))
    whole = Windows(corpus, 9_999_999, packing=packing)
    assert len(whole) == 1
    assert int((whole[0]["shift_labels"] != IGNORE_INDEX).sum()) == 9_999_999 - (packing == "packed")


def test_refusals_name_the_numbers():
    corpus = corpus_of([6])
    with pytest.raises(
        SequenceParallelError, match="document 'd0' holds token id 104, outside the vocabulary \\[0, 104\\)"
    ):
        Windows(corpus, 4, vocab_size=104)[0]
    assert Windows(corpus, 4, vocab_size=105)[0]["shift_labels"].tolist() == [101, 102, 103, 104]
    negative = MemoryCorpus(np.array([1, -7, 2]), [3], ["n"])
    with pytest.raises(SequenceParallelError, match="token id -7"):
        Windows(negative, 2, vocab_size=9)[0]
    with pytest.raises(SequenceParallelError, match=r"packing must be one of .* got 'pack'; did you mean 'packed'"):
        Windows(corpus, 4, packing="pack")
    with pytest.raises(SequenceParallelError, match="sequence_length=0: must be a whole number of at least 1"):
        Windows(corpus, 0)
    with pytest.raises(IndexError, match="window 1 of 1"):
        Windows(corpus, 4)[1]
    with pytest.raises(SequenceParallelError, match=r"3 sizes .* 3 tokens .* 1 names and 6 tokens"):
        MemoryCorpus(np.arange(6), [1, 1, 1], ["a"])
