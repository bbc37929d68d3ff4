"""Frequencies of labels, and the perplexity that they alone give."""

import math

import pytest
import torch

from lightning_sp.callbacks.label_counts import add_counts
from lightning_sp.text.unigram import unigram_perplexity


def test_unigram_perplexity_is_that_of_the_frequencies():
    assert unigram_perplexity(torch.tensor([3, 3, 0, 3, 3])) == pytest.approx(4.0)
    assert unigram_perplexity(torch.tensor([5])) == pytest.approx(1.0)
    shares = [0.75, 0.25]
    assert unigram_perplexity(torch.tensor([30, 10])) == pytest.approx(math.exp(-sum(p * math.log(p) for p in shares)))
    assert add_counts(torch.tensor([1, 2]), torch.tensor([1, 0, 4])).tolist() == [2, 2, 4]
