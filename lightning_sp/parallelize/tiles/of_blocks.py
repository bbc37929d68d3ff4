"""The MLPs, experts and norms of all blocks of a model, let run in tiles of tokens, for good or between steps.

The module tree and every name stay as they were. A norm saves little that is wide, but in float32, and for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, Literal

from torch import Tensor, nn

from lightning_sp.parallelize.tiles.structure import Tileable, mlps_and_norms, norms_outside
from lightning_sp.parallelize.tiles.tiled_mlp import TiledMLP, has_hooks


def tile_mlps(blocks: Sequence[nn.Module], tile_tokens: int | Literal["auto"], root: nn.Module | None = None) -> int:
    """Let the MLPs, experts and norms of blocks run in tiles of tokens; return how many blocks have such MLPs.

    Args:
        blocks: transformer blocks.
        tile_tokens: tokens of a tile; "auto" for as many as the MLP's input has features.
        root: of the model, whose norms outside of blocks run in tiles, too.
    """
    found = [mlps_and_norms(block) for block in blocks]
    for mlps, norms in [*found, ([], norms_outside(root, blocks, found))]:
        for each in (*mlps, *norms):
            each.module.forward = TiledMLP(each, each.module.forward, tile_tokens)
    return sum(bool(mlps) for mlps, _ in found)


class MlpTiles:
    """The MLPs, experts and norms of blocks, whose tiles are switched on and off between steps. Off, nothing of a model is touched.

    Args:
        blocks: transformer blocks.
        root: of the model, whose norms outside of blocks run in tiles, too.
    """

    def __init__(self, blocks: Sequence[nn.Module], root: nn.Module | None = None) -> None:
        found = [mlps_and_norms(block) for block in blocks]
        self._mlps = [_in_tiles(mlps) for mlps, _ in found]
        self._norms = [_in_tiles(norms) for _, norms in found]
        self._outside = _in_tiles(norms_outside(root, blocks, found))
        tiled = chain(*self._mlps, *self._norms, self._outside)
        self._before = {each: vars(each.module).get("forward") for each in tiled}

    def use(self, on: bool) -> None:
        """Let them run in tiles from the next forward on, or whole."""
        for each, before in self._before.items():
            if on:
                each.module.forward = each
            elif vars(each.module).get("forward") is each:
                _put_back(each.module, before)

    def can_tile(self) -> list[bool]:
        """Return of each block whether it has MLPs, none with hooks, and no trial has shown that one looks at other tokens."""
        return [
            bool(of_block) and not any(each.runs_whole or has_hooks(each.module) for each in of_block)
            for of_block in self._mlps
        ]

    def widths(self) -> list[tuple[int, int]]:
        """Return of each block what a token leaves at least in its MLPs and norms, in elements, and the tokens of a tile."""
        return [_widths(mlps, norms) for mlps, norms in zip(self._mlps, self._norms, strict=True)]

    @contextmanager
    def noted(self, number: int | None, run: Callable[[TiledMLP, Sequence[Tensor]], Any]) -> Iterator[None]:
        """Let a function run the MLPs and norms of a block, or those outside of blocks, in their place, where they could run in tiles."""
        with ExitStack() as stack:
            for each in self._outside if number is None else (*self._mlps[number], *self._norms[number]):
                stack.callback(_put_back, each.module, vars(each.module).get("forward"))
                each.module.forward = partial(_noted, each, run)
            yield


def _in_tiles(modules: Iterable[Tileable]) -> list[TiledMLP]:
    return [TiledMLP(each, each.module.forward, "auto") for each in modules]


def _put_back(module: nn.Module, forward: Any) -> None:
    if forward is None:
        del module.forward  # its class has one
    else:
        module.forward = forward


def _noted(tiled: TiledMLP, run: Callable[[TiledMLP, Sequence[Tensor]], Any], *args: Any, **kwargs: Any) -> Any:
    given = tiled.tiled_inputs(*args, **kwargs)
    return tiled.forward(*args, **kwargs) if given is None else run(tiled, given)


def _widths(mlps: Sequence[TiledMLP], norms: Sequence[TiledMLP]) -> tuple[int, int]:
    if not mlps:
        return 0, 0
    features = min(mlps[0].found.features)
    # torch's own RMS norm may be fused.
    written_out = [each for each in norms if type(each.module).forward is not nn.RMSNorm.forward]
    return sum(each.found.widths for each in mlps) + len(written_out) * features, features


@contextmanager
def without_tiles(module: nn.Module) -> Iterator[None]:
    """Let the tiled MLPs of a module run whole: a reference run is the user's own."""
    tiled = {each: f for each in module.modules() if isinstance(f := vars(each).get("forward"), TiledMLP)}
    for each, forward in tiled.items():
        each.forward = forward.forward
    try:
        yield
    finally:
        for each, forward in tiled.items():
            each.forward = forward
