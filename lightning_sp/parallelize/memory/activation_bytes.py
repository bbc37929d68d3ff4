"""What a step leaves for its backward, measured while it runs forward: each memory once, and parameters not at all.

Per block what autograd saves, and of that what the attention operator returned and the block's input, which are what checkpoint policies keep.
Of it, too, what MLPs that could run in tiles save beside their input: the tiles would not.
Casts of weights are counted by themselves, as far as they are alive when the forward has ended: they do not grow with its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sp.attention.staged import SAVED_OPERATORS
from lightning_sp.mesh import gathered_shape
from lightning_sp.parallelize.memory.memory_prediction import BlockBytes, StepBytes
from lightning_sp.parallelize.memory.weight_casts import WeightCasts, storage_key
from lightning_sp.parallelize.tiles import MlpTiles, TiledMLP

# A loss over a vocabulary has its logits three times at the peak: as it saved them, their gradient, and that of what it was computed from.
# A loss in chunks saves none.
_MORE_COPIES_OF_LOGITS = 2


class ActivationBytes:
    """Measures a step; a class because blocks are measured one after the other.

    Args:
        num_blocks: of the model.
        tiles: of their MLPs; None where none can run in tiles.

    Attributes:
        step: the longest one that was measured, None before any.
    """

    def __init__(self, num_blocks: int, tiles: MlpTiles | None = None) -> None:
        self.step: StepBytes | None = None
        self._tiles = tiles
        self._blocks: list[BlockBytes | None] = [None] * num_blocks
        self._casts: WeightCasts | None = None
        self._num_running = 0

    @contextmanager
    def measured(self, root: nn.Module, tokens: int, vocabulary: int = 0) -> Iterator[None]:
        """Measure the forward of a step.

        Args:
            root: the model.
            tokens: of this rank.
            vocabulary: of the logits; 0 where that is not known.
        """
        self._blocks = [None] * len(self._blocks)
        outside: dict[int, torch.UntypedStorage] = {}
        logits: set[int] = set()
        norms = _InTiles(outside)
        noted = nullcontext() if self._tiles is None else self._tiles.noted(None, norms.run)
        # The gradient of a head's weight, which a loss without logits makes in the forward, is no activation.
        of_parameters = {gathered_shape(each) for each in root.parameters() if each.dim() > 1}
        self._casts = casts = WeightCasts(root)
        try:
            with casts, noted, _saved_into(outside, of_parameters, vocabulary, logits):
                yield
        finally:
            self._casts = None
        # Parameters that FSDP has freed by now have no bytes; the root's are still there.
        parameters = {storage_key(each) for each in root.parameters() if isinstance(each, nn.Parameter)}
        others = {key for key in outside if key in parameters or casts.is_cast(key)}
        of_logits = [
            s.nbytes() for key, s in outside.items() if key not in others and (key in logits or not vocabulary)
        ]
        if tokens and any(self._blocks) and (self.step is None or tokens > self.step.tokens):
            whole = _total(outside, others) + _MORE_COPIES_OF_LOGITS * max(of_logits, default=0)
            wide, _ = norms.num_bytes(others)
            held = casts.held_bytes()
            blocks = tuple(each and replace(each, casts=held.get(n, 0)) for n, each in enumerate(self._blocks))
            self.step = StepBytes(
                tokens=tokens, blocks=blocks, outside=whole, outside_casts=held.get(-1, 0), outside_wide=wide
            )

    def of_block(self, number: int, block: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block's forward and note what it leaves. A block that runs in another one counts there."""
        if self._num_running:
            return forward(*args, **kwargs)
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        hidden = next((each for each in given if each.is_floating_point()), None)
        saved: dict[int, torch.UntypedStorage] = {}
        within = nullcontext() if (casts := self._casts) is None else casts.within(number, block)
        mlps = _InTiles(saved)
        noted = nullcontext() if self._tiles is None else self._tiles.noted(number, mlps.run)
        self._num_running += 1
        try:
            with within, noted, _saved_into(saved), _AttentionOutputs() as attention:
                output = forward(*args, **kwargs)
        finally:
            self._num_running -= 1
        inputs = 0 if hidden is None else hidden.untyped_storage().nbytes()
        others = {storage_key(t) for t in (*given, *block.parameters(), *block.buffers())}
        if casts is not None:
            others |= {key for key in saved if casts.is_cast(key)}
        before = self._blocks[number] or BlockBytes(kept=0, attention=0, inputs=0)
        wide, tile = mlps.num_bytes(others)
        self._blocks[number] = BlockBytes(
            kept=before.kept + inputs + _total(saved, others),
            attention=before.attention + _total(attention.storages, others),
            inputs=before.inputs + inputs,
            wide=before.wide + wide,
            tile=max(before.tile, tile),
        )
        return output


class _InTiles:
    """Notes what MLPs and norms that could run in tiles save beside their input; a class because a block has several.

    Args:
        saved: by the block, or outside of blocks, to which what they save belongs, too.
    """

    def __init__(self, saved: dict[int, torch.UntypedStorage]) -> None:
        self._saved = saved
        # Of each, what it has saved, and the share of a tile in its tokens.
        self._found: list[tuple[dict[int, torch.UntypedStorage], float]] = []

    def run(self, tiled: TiledMLP, given: Sequence[Tensor]) -> Any:
        """Run one."""
        inside: dict[int, torch.UntypedStorage] = {}
        with _saved_into(inside):
            output = tiled.forward(*given)
        self._saved.update(inside)
        for each in given:
            inside.pop(storage_key(each), None)  # tiles are cut of it
        x = given[0]
        if num_tokens := x[..., 0].numel():
            self._found.append((inside, tiled.tokens_of_tile(x.shape[-1]) / num_tokens))
        return output

    def num_bytes(self, others: Collection[int]) -> tuple[int, int]:
        """Return the bytes of all of them and the most of one tile, but for some memory."""
        sizes = [(_total(inside, others), share) for inside, share in self._found]
        return sum(size for size, _ in sizes), math.ceil(max((size * share for size, share in sizes), default=0))


class _AttentionOutputs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the memory of what attention operators return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in SAVED_OPERATORS:
            self.storages.update({storage_key(each): each.untyped_storage() for each in made})
        return made


@contextmanager
def _saved_into(
    storages: dict[int, torch.UntypedStorage],
    but: Collection[tuple[int, ...]] = (),
    size: int = 0,
    of_size: set[int] | None = None,
) -> Iterator[None]:
    """Note the memory of what autograd saves.

    Args:
        storages: where.
        but: shapes of tensors that are left out.
        size: of a dimension.
        of_size: where the tensors that have it are noted.
    """

    def note(tensor: Tensor) -> Tensor:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tuple(tensor.shape) in but:
            return tensor  # a parameter, what a library made of one, or no memory of its own
        storages[storage_key(tensor)] = tensor.untyped_storage()
        if of_size is not None and size in tensor.shape:
            of_size.add(storage_key(tensor))
        return tensor.detach()  # an output that holds itself would never go

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield


def _total(storages: dict[int, torch.UntypedStorage], others: Iterable[int]) -> int:
    return sum(storage.nbytes() for key, storage in storages.items() if key not in others)
