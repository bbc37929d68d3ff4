"""The perplexity of a unigram model, which knows nothing but the tokens' frequencies: the yardstick beside a model's perplexity."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_sp.errors import SequenceParallelError
from lightning_sp.text.corpus import Corpus


def unigram_perplexity(counts: Tensor, train_counts: Tensor | None = None) -> float:
    """Return the perplexity of counted tokens under frequencies: their own, or add-one smoothed those of training.

    Under their own it is a bound: no model that sees one token at a time does better on them.

    Args:
        counts: how often each token id occurs.
        train_counts: how often each occurs in the training text.

    Shapes: (V,), (V,) -> a number.
    """
    occurring = counts > 0
    shares = counts[occurring].double() / counts.sum()
    probabilities = shares
    if train_counts is not None:
        probabilities = (train_counts[occurring] + 1).double() / (train_counts.sum() + train_counts.numel())
    return float(torch.exp(-(shares * probabilities.log()).sum()))


def held_out_perplexity(train: Corpus, held_out: Corpus, vocab_size: int) -> float:
    """Return the unigram perplexity of the held-out tokens, trained on the others. Reads every token once.

    Raises:
        SequenceParallelError: no token is held out.
    """
    counts = count_tokens(held_out, vocab_size)
    if not counts.sum():
        raise SequenceParallelError("no held-out tokens to compute a perplexity of: raise held_out")
    return unigram_perplexity(counts, count_tokens(train, vocab_size))


def count_tokens(corpus: Corpus, vocab_size: int) -> Tensor:
    """Return how often each token id occurs.

    Shapes: -> (vocab_size,), int64.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for document, size in enumerate(corpus.sizes):
        counts += np.bincount(corpus.read(document, 0, int(size)), minlength=vocab_size)
    return torch.from_numpy(counts)
