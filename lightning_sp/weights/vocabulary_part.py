"""A rank's words of the vocabulary, where a table or an output head is split over ranks, and what these say to each other of a token's logits.

    ids         -> a row of the rank that has the word, zeros of the others       -> their sum
    logits      (c, v), of its own words -> largest, sum of exponents, the target -> some numbers of each token, over the ranks
                                         -> all of them (c, V), where only they will do

Legend: c tokens, v words of this rank, V words of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_sp import comm

# The attribute of a layer whose words are split over ranks.
_ATTRIBUTE = "_lightning_sp_vocabulary_part"


@dataclass(frozen=True, kw_only=True)
class VocabularyPart:
    """Which words a rank has, and with whom it shares the others.

    Args:
        first: of its words.
        words: how many it has.
        total: how many there are.
        group: the ranks that have all of them, in their order.
    """

    first: int
    words: int
    total: int
    group: ProcessGroup

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return each word's row among this rank's, 0 for another rank's, and whether it is one of them; what is no word is no row of any."""
        rows = ids - self.first
        is_here = (rows >= 0) & (rows < self.words)
        return rows.masked_fill(~is_here & (ids >= 0) & (ids < self.total), 0), is_here

    def own(self, of_words: Tensor) -> Tensor:
        """Return this rank's part of something of all words. Shapes: (..., V) -> (..., v)."""
        return of_words.narrow(-1, self.first, self.words)

    def copied(self, whole: Tensor) -> Tensor:
        """Return what all ranks have, for each to go on with its own words. Communicates: in the backward one all_reduce."""
        return comm.copy_to_ranks(whole, self.group)

    def sum(self, parts: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, with which all go on alike. Communicates: one all_reduce."""
        return comm.sum_of_ranks(parts, self.group)

    def largest(self, parts: Tensor) -> Tensor:
        """Return the elementwise largest of the ranks' tensors, without a gradient. Communicates: one all_reduce."""
        return comm.largest(parts, self.group)

    def gathered(self, logits: Tensor) -> Tensor:
        """Return all words', with which all go on alike. Shapes: (..., v) -> (..., V). Communicates: one all_gather."""
        return comm.gather_parts(logits, -1, self.group)

    def logsumexp(self, logits: Tensor) -> Tensor:
        """Return the logarithm of the sum of exponents over all words. Shapes: (..., v) -> (...). Communicates: two all_reduces of (...)."""
        largest = self.largest(logits.detach().amax(-1))
        return self.sum((logits - largest.unsqueeze(-1)).exp().sum(-1)).log() + largest

    def chosen(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the logits of words that some rank has each. Shapes: (..., v), (..., k) -> (..., k). Communicates: one all_reduce of that."""
        rows, is_here = self.places(ids)
        return self.sum(logits.gather(-1, rows).masked_fill(~is_here, 0))

    def argmax(self, logits: Tensor) -> Tensor:
        """Return the word of the largest logit, the first of several. Shapes: (..., v) -> (...). Communicates: two all_gathers of (...)."""
        largest, rows = logits.detach().max(-1)
        every = torch.stack(comm.gather(largest, self.group)), torch.stack(comm.gather(rows + self.first, self.group))
        return every[1].gather(0, every[0].argmax(0, keepdim=True)).squeeze(0)


def vocabulary_part(layer: nn.Module) -> VocabularyPart | None:
    """Return which words of a table or an output head this rank has; None where it has all."""
    found = vars(layer).get(_ATTRIBUTE)
    return found if isinstance(found, VocabularyPart) else None


def remember_part(layer: nn.Module, part: VocabularyPart) -> None:
    """Let `vocabulary_part` find it."""
    setattr(layer, _ATTRIBUTE, part)
