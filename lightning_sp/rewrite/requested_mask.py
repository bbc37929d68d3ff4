"""What a Hugging Face model gets for a mask that it asks for: a value to hand on to its attention, which is no tensor."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from lightning_sp.attention import AttentionMask
from lightning_sp.errors import SequenceParallelError


class RequestedMask:
    """A mask of the whole sequence; a class because the model's code handles it.

    A model that computes with it, to select keys say, would do so with this rank's tokens alone. That is refused. A cut that leaves all of
    this rank's keys in is none.

    Args:
        mask: of the whole sequence.
        says_nothing: whether it hides nothing but later tokens, or nothing at all: then a layer may say whether it is causal.
        shape: what it would have for this rank's tokens, (rows, 1, queries, keys): a model within another asks whether a mask is made already.
        blind_targets: whether a token that sees no key has a target, in a model whose own attention is eager.
    """

    def __init__(
        self, mask: AttentionMask, *, says_nothing: bool, shape: tuple[int, int, int, int], blind_targets: bool = False
    ) -> None:
        self.mask, self.says_nothing, self.blind_targets = mask, says_nothing, blind_targets
        self.shape, self.ndim = shape, len(shape)

    def __getitem__(self, index: Any) -> RequestedMask:
        parts = index if isinstance(index, tuple) else (index,)
        if not all(part is Ellipsis or (isinstance(part, slice) and self._keeps_all(part)) for part in parts):
            self._refuse("takes a part of")
        return self

    def _keeps_all(self, part: slice) -> bool:
        return part.start in (None, 0) and part.step in (None, 1) and (part.stop is None or part.stop >= self.shape[3])

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # Python and torch look for protocols that it does not have
        self._refuse(f"reads `{name}` of")

    def _compute(self, *_: Any) -> NoReturn:
        self._refuse("computes with")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __rand__ = __or__ = __ror__ = _compute
    __invert__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = __len__ = __iter__ = _compute

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            # A checkpointed block is a function of torch there, and hands the mask on. What computes with it is run again eagerly.
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        cls._refuse(f"calls torch's `{getattr(function, '__name__', function)}` on")

    @staticmethod
    def _refuse(what: str) -> NoReturn:
        raise SequenceParallelError(
            f"the model {what} the attention mask that it asked for (to select keys by it, say, or to join it with a mask of its own): on each "
            "rank it would be that of the rank's own tokens, so it cannot be carried; use a model that hands it on to its attention as it is"
        )
