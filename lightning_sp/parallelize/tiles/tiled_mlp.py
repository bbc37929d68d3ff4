"""The forward of an MLP, of experts or of a norm in tiles of tokens: of what it saves one tile's is alive, forward and backward.

    out[tile] = mlp(x[tile])                       each tile recomputed in its backward

An MLP takes each token by itself, so tiles give what the whole would; so do experts, which are told each token's. Nothing is exchanged, and
FSDP2 gathers the weights once for all tiles: they are those of the block. The price is the MLP's forward once more.
Source: TiledMLP of ALST, arXiv:2506.13996, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_sp.global_view.tensors.sequence_tensor import GlobalTensor
from lightning_sp.parallelize.recomputation.same_dtype import in_the_same_dtype
from lightning_sp.parallelize.tiles.structure import Tileable
from lightning_sp.parallelize.tiles.trial import Tried, try_tokens
from lightning_sp.weights.matmuls import keeping_none

# Tokens that choose alike in a trial, at least.
_CROWD = 1024


class TiledMLP:
    """The forward of one MLP, of experts or of a norm, in tiles; a class because calls decide whether it takes each token by itself.

    Args:
        found: the module, and its inputs.
        forward: its own.
        tile_tokens: tokens of a tile, of all rows together; "auto" for as many as the input has features.

    Attributes:
        runs_whole: whether a trial has shown that it looks at other tokens.
    """

    def __init__(self, found: Tileable, forward: Callable[..., Any], tile_tokens: int | Literal["auto"]) -> None:
        self.found, self.forward, self.tile_tokens = found, forward, tile_tokens
        self.runs_whole = False
        # By `training`: dropout by a function draws in one of them.
        self._tried: dict[bool, Tried] = {}
        self._parametrized = _parametrized(found.module)

    @property
    def module(self) -> nn.Module:
        """The module."""
        return self.found.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output. Shapes: (..., tokens, E) -> (..., tokens, E)."""
        given = self.tiled_inputs(*args, **kwargs)
        if given is None:
            return self.forward(*args, **kwargs)
        tokens, length = given[0].shape[-2], self.tokens_of_row(given[0])
        # Of several, each has some of the tokens: what is wide in one is alive, and not in all.
        if tokens <= length and not self.found.is_one_of_several:
            return self.forward(*given)
        if not self._is_per_token(given, length):
            return self.forward(*given)
        # Nothing is drawn in it: the random state need not be kept. Nor what is wide, by a checkpoint around it.
        run = partial(checkpoint, in_the_same_dtype(self.forward), use_reentrant=False, preserve_rng_state=False)
        with keeping_none():
            done = [run(*tile) for tile in zip(*(torch.split(each, length, -2) for each in given), strict=True)]
        return torch.cat(done, -2)

    def tiled_inputs(self, *args: Any, **kwargs: Any) -> Sequence[Tensor] | None:
        """Return the inputs of a call that runs in tiles, if they are long enough; None for one that runs whole."""
        names = self.found.inputs
        given = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
        if not torch.is_grad_enabled() or self.runs_whole or len(given) != len(names) or not _of_tokens(given):
            return None
        # A parameter that is computed for this call alone is its own again when the tile is computed again.
        if has_hooks(self.module) or self._parametrized != _parametrized(self.module):
            return None
        return given

    def tokens_of_tile(self, num_features: int) -> int:
        """Return how many tokens a tile has, of all rows together, for an input of some features."""
        return num_features if self.tile_tokens == "auto" else self.tile_tokens

    def tokens_of_row(self, x: Tensor) -> int:
        """Return how many tokens of each row a tile has. Shapes: (..., tokens, E)."""
        return max(1, self.tokens_of_tile(x.shape[-1]) // max(1, x[..., 0, 0].numel()))

    def _is_per_token(self, given: Sequence[Tensor], length: int) -> bool:
        """Return whether each token is by itself, as tried once, and again for more tokens than were tried; warn where it is not."""
        tokens, training = given[0].shape[-2], self.module.training
        before = self._tried.get(training)
        if before is not None and (before.tokens is None or tokens <= before.tokens):
            return True
        crowd = max(_CROWD // max(1, given[0][..., 0, 0].numel()), 2 * length)
        tried = self._tried[training] = try_tokens(self.module, self.forward, given, crowd)
        if tried.why_whole:
            self.runs_whole = True
            rank_zero_warn(f"mlp_tile_tokens: {type(self.module).__name__} {tried.why_whole}; it runs whole")
        return not self.runs_whole


def has_hooks(module: nn.Module) -> bool:
    """Return whether a part of an MLP has a hook, which would see tiles. Those of the MLP itself see all tokens."""
    return any(
        each._forward_hooks or each._forward_pre_hooks or each._backward_hooks
        for each in module.modules()
        if each is not module
    )


def _of_tokens(given: Sequence[Any]) -> bool:
    """Return whether inputs are of the same tokens: hidden states, and for experts whose these are."""
    if not all(isinstance(each, Tensor) and not isinstance(each, GlobalTensor) and each.dim() > 1 for each in given):
        return False
    same = all(each.shape[:-1] == given[0].shape[:-1] for each in given) and given[0].shape[-2] > 0
    chosen = [each for each in given[1:] if not each.is_floating_point()]
    return same and given[0].is_floating_point() and len(chosen) == (len(given) > 1)


def _parametrized(module: nn.Module) -> set[nn.Module]:
    return {each for each in module.modules() if hasattr(each, "parametrizations")}
