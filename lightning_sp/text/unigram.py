"""The perplexity of a unigram model."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sp.errors import SequenceParallelError
from lightning_sp.text.corpus import Corpus


def unigram_perplexity(train: Corpus, held_out: Corpus, vocab_size: int) -> float:
    """Return the perplexity of held-out tokens under the training tokens' frequencies, add-one smoothed.

    What a model that knows no context can reach: the yardstick beside a validation perplexity. Reads every token once.
    """
    train_counts, held_out_counts = (_count(corpus, vocab_size) for corpus in (train, held_out))
    if not held_out_counts.sum():
        raise SequenceParallelError("no held-out tokens to compute a perplexity of: raise held_out")
    log_probs = np.log((train_counts + 1) / (train_counts.sum() + vocab_size))
    return float(np.exp(-(held_out_counts @ log_probs) / held_out_counts.sum()))


def _count(corpus: Corpus, vocab_size: int) -> NDArray[np.int64]:
    counts = np.zeros(vocab_size, dtype=np.int64)
    for document, size in enumerate(corpus.sizes):
        counts += np.bincount(corpus.read(document, 0, int(size)), minlength=vocab_size)
    return counts


def unigram_perplexity(counts: Tensor) -> float:
    """Return the perplexity, on the counted tokens themselves, of the model that knows their frequencies alone."""
    shares = counts[counts > 0].double() / counts.sum()
    return float(torch.exp(-(shares * shares.log()).sum()))
