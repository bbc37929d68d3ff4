"""What a model does to whole rows of the scores that it writes out: it subtracts their maximum, or puts a sink beside their keys.

scores - scores.max(-1, keepdim=True).values            as scores, for a softmax does not see what is added to all of a row
cat([scores, sinks], -1).softmax(-1)[..., :-1]          the operator's sinks: a score of each head, for a key without a value
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_sp.global_view.calls.call import NO_RULE, Call, Rule, is_plain, named
from lightning_sp.global_view.rules.attention.written_attention import Scores, ScoresMetadata, refusal
from lightning_sp.global_view.rules.properties import RULES as PROPERTIES
from lightning_sp.global_view.tensors.sequence_tensor import GlobalTensor


class Maxima(GlobalTensor):
    """The largest score of each query, of which nothing is computed: scores minus it are as good as scores. For anything else it is made."""

    scores: Scores
    taken: str

    @staticmethod
    def __new__(cls, scores: Scores, taken: str) -> Maxima:
        """Return those of scores, of shape (..., S, 1), taken by max, amax or without a gradient."""
        made = cls.without_memory((*scores.shape[:-1], 1), scores.dtype, scores.device)
        made.scores, made.taken, made.of_sequence = scores, taken, scores.of_sequence
        return made

    def __tensor_flatten__(self) -> tuple[list[str], MaximaMetadata]:
        """Tell a compiler what these are made of: what their scores are."""
        names, of_scores = self.scores.__tensor_flatten__()
        return names, MaximaMetadata(of_scores, self.taken, self.scores.shape[-1])

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], metadata: MaximaMetadata, size: Any, stride: Any) -> Maxima:
        """Return what a compiler traces in their place."""
        shape = (*size[:-1], metadata.num_keys)
        return Maxima(Scores.__tensor_unflatten__(inner, metadata.of_scores, shape, None), metadata.taken)

    @classmethod
    def __metadata_guard__(cls, known: MaximaMetadata, given: MaximaMetadata) -> bool:
        """Return whether maxima may take the graph of others."""
        return known == given

    def __getattr__(self, name: str) -> Any:
        """Return a tensor of the attention that is noted."""
        if name.startswith("noted_"):
            return getattr(self.scores, name)
        raise AttributeError(name)


@dataclass(frozen=True)
class MaximaMetadata:
    """What guards compare of maxima.

    Args:
        of_scores: that of their scores.
        taken: how.
        num_keys: T of the scores; a length, which guards do not compare.
    """

    of_scores: ScoresMetadata
    taken: str
    num_keys: int = field(compare=False)

    def __deepcopy__(self, memo: Any) -> MaximaMetadata:
        return MaximaMetadata(deepcopy(self.of_scores, memo), self.taken, 0)


def maxima(call: Call) -> Any:
    """Note the largest score of each query, for the scores that it is taken from."""
    x, dim = call.args[0], call.argument(1, "dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not isinstance(x, Scores) or not isinstance(dim, int) or dim % x.dim() != x.dim() - 1:
        return NO_RULE
    if not call.argument(2, "keepdim", False) or x.attention.is_weights:
        return NO_RULE
    found = Maxima(Scores(x.attention, x.lead, x.dtype), call.name)  # of what is noted now: scores may be written to
    return found if call.name == "amax" else torch.return_types.max((found, found))


def without_maxima(call: Call) -> Any:
    """Subtract the largest score of each query."""
    x, other = call.args[:2]
    if not isinstance(other, Maxima) or not isinstance(x, Scores):
        return NO_RULE
    is_own = other.scores.attention is x.attention and not x.attention.is_weights and not x.attention.is_shifted
    if not is_own or call.kwargs or call.function.__name__ != "sub":
        raise refusal("a difference to another maximum")
    return x.changed(is_shifted=other.taken)


def with_sinks(call: Call) -> Any:
    """Put a number of each head beside the scores of its keys."""
    parts, dim = list(call.args[0]), call.argument(1, "dim", 0)
    if len(parts) != 2 or not isinstance(parts[0], Scores) or not is_plain(parts[1]):
        raise refusal(call.name)
    x, sinks = parts
    known = x.attention
    is_new = known.sinks is None and not known.is_weights and not known.is_shifted
    is_alone = is_new and known.factor is None and x.lead == known.lead
    fits = sinks.dim() == 4 and x.dim() == 4 and tuple(sinks.shape) == (*x.shape[:3], 1)
    if dim % x.dim() != x.dim() - 1 or not is_alone or not fits or _varies(sinks, 0) or _varies(sinks, 2):
        raise refusal("a score beside the keys that is not one number for each head")
    return x.changed(sinks=sinks[0, :, 0, 0], shows_sinks=True)


def _varies(x: Tensor, dim: int) -> bool:
    return x.shape[dim] > 1 and x.stride(dim) != 0


def without_sinks(call: Call) -> Any:
    """Leave the weights of the sinks away, which stand behind those of the keys."""
    x, index = call.args
    last = index[-1] if isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis else None
    full = isinstance(index, tuple) and len(index) == x.dim() and all(each == slice(None) for each in index[:-1])
    last = index[-1] if full else last
    if not x.attention.shows_sinks or not x.attention.is_weights or last not in (slice(None, -1), slice(0, -1)):
        raise refusal("getitem")
    return x.changed(shows_sinks=False)


RULES: dict[str, Rule] = {
    **named("max amax", maxima),
    **named("sub subtract", without_maxima),
    **named("cat concat concatenate", with_sinks),
    **named("getitem", without_sinks),
}
# What scores with sinks beside them, and maxima, still take.
_BESIDE_SINKS = {
    "max",
    "amax",
    "sub",
    "subtract",
    "softmax",
    "dropout",
    "getitem",
    "to",
    "type_as",
    "float",
    "contiguous",
}
_OF_MAXIMA = {"sub", "subtract", "detach"}


def on_rows(call: Call, types: Collection[type]) -> Any:
    """Note what a function does to rows of scores; NO_RULE for what is done to each score by itself.

    Raises:
        SequenceParallelError: it is done to maxima or beside sinks, and not carried.
    """
    if Maxima in types:
        if call.name in PROPERTIES:
            return PROPERTIES[call.name](call)
        if call.name not in _OF_MAXIMA or (call.name == "detach") != (Scores not in types):
            raise refusal(f"{call.name} with their maxima")
        if call.name == "detach":
            return Maxima(call.args[0].scores, "detach")
    given = [each for each in call.args if isinstance(each, Scores)]
    if any(each.attention.shows_sinks for each in given) and call.name not in {*_BESIDE_SINKS, *PROPERTIES}:
        raise refusal(f"{call.name} beside sinks")
    rule = RULES.get(call.name)
    return NO_RULE if rule is None else rule(call)
