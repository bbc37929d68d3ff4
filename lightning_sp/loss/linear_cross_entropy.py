"""Cross entropy of an output head over the tokens of all ranks, without the logits: for models whose head is not found by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor
from lightning_sp.labels import IGNORE_INDEX
from lightning_sp.loss.cross_entropy import sharded_cross_entropy
from lightning_sp.loss.output_head.deferred_logits import DeferredLogits, recorded
from lightning_sp.loss.output_head.head_call import LaterHeadCall, UnreadCall


def linear_cross_entropy(
    hidden: Tensor,
    head: nn.Linear,
    shift_labels: Tensor,
    *,
    transform: Callable[[Tensor], Tensor] | None = None,
    chunk_tokens: int | str = "auto",
    group: ProcessGroup | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
) -> Tensor:
    """Return `sharded_cross_entropy(transform(head(hidden)), shift_labels)`, the logits of a chunk of tokens at a time.

    Args:
        hidden: this rank's hidden states, or in the global view those that show the whole, in any floating dtype.
        head: the output layer, which is called: FSDP gathers its weights for it.
        shift_labels: as `sharded_cross_entropy` takes them.
        transform: what is done to the logits (c, V) of each token, a softcap: `lambda x: 30 * torch.tanh(x / 30)`. It has no parameters.
        chunk_tokens: how many tokens' logits exist at a time. "auto": about 32 MiB of them in float32, 512 on a GPU, 64 tokens at
            least.
        group: as there.
        ignore_index: as there.
        reduction: as there.

    Shapes: (..., E), (...) -> (). Communicates: as there.

    Raises:
        SequenceParallelError: the head is no plain nn.Linear of the hidden states.
    """
    plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
    if not plain or hidden.shape[-1] != head.in_features:
        given: Any = f"{type(head).__name__}({getattr(head, 'in_features', '?')}, {getattr(head, 'out_features', '?')})"
        raise SequenceParallelError(
            f"linear_cross_entropy of hidden states {tuple(hidden.shape)} and the head {given}: it takes an nn.Linear of as many features; "
            "for any other head sharded_cross_entropy(head(hidden), shift_labels)"
        )
    shown = hidden.flatten(0, -2)
    rows = shown.local if isinstance(shown, SequenceTensor) else shown
    call = LaterHeadCall(head, rows, chunk_tokens)
    logits: Tensor = DeferredLogits.of(call, rows)
    if transform is not None:
        # Of a part of the words only what is known can be made: an opaque function gets those of all, a chunk at a time.
        known = None if call.part is None else recorded(transform, UnreadCall(head, rows, chunk_tokens), rows)
        functions = (transform,) if known is None else known
        logits = DeferredLogits.of(call, rows, functions=functions)
    return sharded_cross_entropy(
        SequenceTensor(logits, shown.placement) if isinstance(shown, SequenceTensor) else logits,
        shift_labels,
        group=group,
        ignore_index=ignore_index,
        reduction=reduction,
    )
