"""The perplexity of frequencies on held-out text."""

import numpy as np
import pytest

from lightning_sp.errors import SequenceParallelError
from lightning_sp.text.corpus import CorpusView, MemoryCorpus
from lightning_sp.text.unigram import held_out_perplexity


def test_the_unigram_perplexity_is_the_formulas():
    corpus = MemoryCorpus(np.array([0, 0, 1, 2, 0, 1]), [4, 2], ["train", "test"])
    train, test = CorpusView(corpus, np.array([0])), CorpusView(corpus, np.array([1]))
    # counts 2, 1, 1, 0 of 4 -> (3, 2, 2, 1) / 8; held out 0 and 1
    assert held_out_perplexity(train, test, 4) == pytest.approx((3 / 8 * 2 / 8) ** -0.5, rel=1e-12)
    with pytest.raises(SequenceParallelError, match="no held-out tokens"):
        held_out_perplexity(train, CorpusView(corpus, np.array([], dtype=np.int64)), 4)
