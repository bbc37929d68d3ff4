"""What a drawn model may be trained for.

Legend: B rows, S tokens, D width, V words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Of the module, for its heads, hidden states (B, S, D), ids (B, S) and the words that follow (B, S), -100 for none.
Loss = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def _words(model: Any, h: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.words(h).flatten(0, 1), labels.flatten())


def _of_each(model: Any, h: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.words(h).mT, labels, reduction="none")


def _log_likelihood(model: Any, h: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    chosen: Tensor = model.words(h).log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -F.logsigmoid((chosen * (labels >= 0)).sum(1) / 10).mean()


def _contrast(model: Any, h: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    a, b = F.normalize(h.mean(1), dim=-1), F.normalize(h[:, -1], dim=-1)
    return F.cross_entropy(a @ b.T * 5, torch.arange(len(h), device=h.device))


def _spread_of_words(model: Any, h: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    mean: Tensor = model.words(h).softmax(-1).mean((0, 1))
    return _words(model, h, ids, labels) + 0.1 * (mean * mean.clamp_min(1e-9).log()).sum()


LOSSES: dict[str, Loss] = {
    "words": _words,
    "words shifted inside": lambda m, h, ids, labels: _words(m, h[:, :-1], ids, ids[:, 1:]),
    "a sum over a number": lambda m, h, ids, labels: _of_each(m, h, labels).sum() / labels.numel(),
    "weighted words": lambda m, h, ids, labels: (_of_each(m, h, labels) * (1 + ids % 3)).mean(),
    "sums of sequences": lambda m, h, ids, labels: _of_each(m, h, labels).sum(1).mean() / 10,
    "chosen words": lambda m, h, ids, labels: F.cross_entropy(m.words(h)[ids > 20], labels[ids > 20]),
    "class of the mean": lambda m, h, ids, labels: F.cross_entropy(m.classes(h.mean(1)), ids[:, 0] % 5),
    "class of the last": lambda m, h, ids, labels: F.cross_entropy(m.classes(h[:, -1]), ids[:, 0] % 5),
    "class of the first": lambda m, h, ids, labels: F.cross_entropy(m.classes(h[:, 0]), ids[:, 3] % 5),
    "largest number": lambda m, h, ids, labels: F.mse_loss(m.number(h).amax(1), (ids.sum(1, keepdim=True) % 7).to(h)),
    "a number of each token": lambda m, h, ids, labels: F.mse_loss(m.number(h).squeeze(-1), ids.to(h) / 40),
    "contrast": _contrast,
    "log likelihood of sequences": _log_likelihood,
    "words and a z-loss": lambda m, h, ids, labels: (
        _words(m, h, ids, labels) + m.words(h).logsumexp(-1).square().mean() / 100
    ),
    "words and neighbours": lambda m, h, ids, labels: (
        _words(m, h, ids, labels) + (h[:, 1:] - h[:, :-1]).square().mean() / 10
    ),
    "words and a variance": lambda m, h, ids, labels: _words(m, h, ids, labels) + h.var(1).mean() / 10,
    "words and products": lambda m, h, ids, labels: (
        _words(m, h, ids, labels) + torch.einsum("bsd,bse->bde", h, h).tanh().square().mean()
    ),
    "words and their spread": _spread_of_words,
}
