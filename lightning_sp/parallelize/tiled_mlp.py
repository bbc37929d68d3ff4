"""MLPs of transformer blocks, and the norms beside them, in tiles of tokens: of what they save one tile's is alive, forward and backward.

    out = cat(mlp(x[tile]) for each tile)          each tile recomputed in its backward

An MLP takes each token by itself, so tiles give what the whole would. Nothing is exchanged, and FSDP2 gathers the weights once for all tiles:
they are those of the block. The price is the MLP's forward once more. A norm saves little that is wide, but in float32, and for each token.
Source: TiledMLP of ALST, arXiv:2506.13996, section 3.1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from lightning_sp.global_view.tensors.sequence_tensor import GlobalTensor
from lightning_sp.mesh import gathered_shape
from lightning_sp.parallelize.compilation import without_compilation
from lightning_sp.parallelize.recomputation.same_dtype import in_the_same_dtype
from lightning_sp.parallelize.recomputation.state_of_blocks import leaves_alone
from lightning_sp.weights.matmuls import keeping_none

# Tokens that a first call is tried on, twice: whole, and its halves by themselves.
_TRIED_TOKENS = 32
# Of the largest output: what a product of other shapes may round otherwise.
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
# Children of attention modules, by the names that are common.
_ATTENTION = ("attn", "attention", "q_proj", "qkv", "query", "key", "c_attn", "wq")


class TiledMLP:
    """The forward of one MLP, or norm, in tiles; a class because the first call decides whether it takes each token by itself.

    Args:
        module: the MLP or norm.
        forward: its own.
        tile_tokens: tokens of a tile, of all rows together; "auto" for as many as the MLP's input has features.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Tensor], tile_tokens: int | Literal["auto"]) -> None:
        self.module, self.forward, self.tile_tokens = module, forward, tile_tokens
        self._is_per_token: bool | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the MLP's output. Shapes: (..., tokens, E) -> (..., tokens, E)."""
        if not self.may_tile(*args, **kwargs):
            return self.forward(*args, **kwargs)
        (x,) = (*args, *kwargs.values())
        rows = x[..., 0, 0].numel()
        length = max(1, self.tokens_of_tile(x.shape[-1]) // max(1, rows))
        if x.shape[-2] <= length:
            return self.forward(x)
        if self._is_per_token is None:
            with (
                _disable_current_modes()
            ):  # a checkpoint around it counts operators, and would miss these when it runs again
                self._is_per_token = self._try(x.detach())
        if not self._is_per_token:
            return self.forward(x)
        forward, tiles = in_the_same_dtype(self.forward), torch.split(x, length, -2)
        # Nothing is drawn in it: the random state need not be kept. Nor what is wide, by a checkpoint around it.
        with keeping_none():
            done = [checkpoint(forward, tile, use_reentrant=False, preserve_rng_state=False) for tile in tiles]
        return torch.cat(done, -2)

    def may_tile(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether a call runs in tiles, if its input is long enough."""
        given = (*args, *kwargs.values())
        if not torch.is_grad_enabled() or len(given) != 1 or given[0].dim() < 2 or isinstance(given[0], GlobalTensor):
            return False
        return not self.runs_whole and not _has_hooks(self.module)

    def tokens_of_tile(self, num_features: int) -> int:
        """Return how many tokens a tile has, of all rows together, for an input of some features."""
        return num_features if self.tile_tokens == "auto" else self.tile_tokens

    @property
    def runs_whole(self) -> bool:
        """Whether a trial has shown that it looks at other tokens."""
        return self._is_per_token is False

    @torch.no_grad()
    def _try(self, x: Tensor) -> bool:
        """Return whether some tokens give the same by themselves, and leave no trace; warn where they do not."""
        few = x[..., :_TRIED_TOKENS, :]
        half = few.shape[-2] // 2
        if not leaves_alone(self.module, partial(self.forward, few)):
            rank_zero_warn(
                f"mlp_tile_tokens: {type(self.module).__name__} writes in its forward to what it keeps, which each tile would do; "
                "it runs whole"
            )
            return False
        whole, parts = self.forward(few), [self.forward(few[..., :half, :]), self.forward(few[..., half:, :])]
        if isinstance(whole, Tensor) and whole.shape == few.shape:
            error = (torch.cat(parts, -2) - whole).abs().max()
            if bool(error <= _ROUNDING.get(whole.dtype, 0.0) * whole.abs().max()):
                return True
        rank_zero_warn(
            f"mlp_tile_tokens: {type(self.module).__name__} does not take each token by itself, or returns more than its tokens; it runs whole"
        )
        return False


def tile_mlps(blocks: Sequence[nn.Module], tile_tokens: int | Literal["auto"], root: nn.Module | None = None) -> int:
    """Let the MLPs and norms of blocks run in tiles of tokens; return how many MLPs there are. The module tree and every name stay as they were.

    Args:
        blocks: transformer blocks.
        tile_tokens: tokens of a tile; "auto" for as many as the MLP's input has features.
        root: of the model, whose norms outside of blocks run in tiles, too.
    """
    found = [_mlps_and_norms(block) for block in blocks]
    number = sum(len(mlps) for mlps, _ in found)
    for mlps, norms in [*found, ([], _norms_outside(root, blocks, found))]:
        for each in (*mlps, *norms):
            each.forward = TiledMLP(each, each.forward, tile_tokens)
    return number


class MlpTiles:
    """The MLPs and norms of blocks, whose tiles are switched on and off between steps. Off, nothing of a model is touched.

    Args:
        blocks: transformer blocks.
        root: of the model, whose norms outside of blocks run in tiles, too.
    """

    def __init__(self, blocks: Sequence[nn.Module], root: nn.Module | None = None) -> None:
        found = [_mlps_and_norms(block) for block in blocks]
        self._mlps = [_in_tiles(mlps) for mlps, _ in found]
        self._norms = [_in_tiles(norms) for _, norms in found]
        self._outside = _in_tiles(_norms_outside(root, blocks, found))
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
            bool(of_block) and not any(each.runs_whole or _has_hooks(each.module) for each in of_block)
            for of_block in self._mlps
        ]

    def widths(self) -> list[tuple[int, int]]:
        """Return of each block what a token leaves at least in its MLPs and norms, in elements, and the tokens of a tile."""
        return [_widths(mlps, norms) for mlps, norms in zip(self._mlps, self._norms, strict=True)]

    @contextmanager
    def noted(self, number: int | None, run: Callable[[TiledMLP, Tensor], Any]) -> Iterator[None]:
        """Let a function run the MLPs and norms of a block, or those outside of blocks, in their place, where they could run in tiles."""
        with ExitStack() as stack:
            for each in self._outside if number is None else (*self._mlps[number], *self._norms[number]):
                stack.callback(_put_back, each.module, vars(each.module).get("forward"))
                each.module.forward = partial(_noted, each, run)
            yield


def _in_tiles(modules: Iterable[nn.Module]) -> list[TiledMLP]:
    return [TiledMLP(each, each.forward, "auto") for each in modules]


def _put_back(module: nn.Module, forward: Any) -> None:
    if forward is None:
        del module.forward  # its class has one
    else:
        module.forward = forward


def _noted(tiled: TiledMLP, run: Callable[[TiledMLP, Tensor], Any], *args: Any, **kwargs: Any) -> Any:
    return run(tiled, *args, *kwargs.values()) if tiled.may_tile(*args, **kwargs) else tiled.forward(*args, **kwargs)


def _widths(mlps: Sequence[TiledMLP], norms: Sequence[TiledMLP]) -> tuple[int, int]:
    linear: list[Any] = [part for each in mlps for part in each.module.modules() if _is_linear(part)]
    if not linear:
        return 0, 0
    features = _features(mlps[0].module)
    # torch's own RMS norm may be fused.
    written_out = [each for each in norms if type(each.module).forward is not nn.RMSNorm.forward]
    return sum(max(gathered_shape(each.weight)[-2:]) for each in linear) + len(written_out) * features, features


def _features(mlp: nn.Module) -> int:
    """Return the features of an MLP's input."""
    first: Any = next(each for each in mlp.modules() if _is_linear(each))
    return int(first.in_features if hasattr(first, "in_features") else first.nx)


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


def _mlps_and_norms(block: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return a block's MLPs, and its norms of as many features as these take: not those of single heads, whose tokens are elsewhere."""
    block = without_compilation(block)
    mlps = list(_mlps(block))
    inside, features = {part for mlp in mlps for part in mlp.modules()}, {_features(mlp) for mlp in mlps}
    norms = [each for each in block.modules() if each not in inside and _looks_like_norm(each, features)]
    return mlps, norms


def _norms_outside(
    root: nn.Module | None, blocks: Sequence[nn.Module], found: Iterable[tuple[list[nn.Module], list[nn.Module]]]
) -> list[nn.Module]:
    """Return the norms outside of blocks that have the features of a block's: the last one of a language model, say."""
    inside = {part for block in blocks for part in without_compilation(block).modules()}
    features = {_features(mlp) for mlps, _ in found for mlp in mlps}
    others = () if root is None else root.modules()
    return [each for each in others if each not in inside and _looks_like_norm(each, features)]


def _looks_like_norm(module: nn.Module, features: set[int]) -> bool:
    sizes = {tuple(gathered_shape(each)) for each in module.parameters()}
    of_features = len(sizes) == 1 and sizes <= {(each,) for each in features}
    is_leaf = not any(True for _ in (*module.children(), *module.buffers()))
    named = "norm" in type(module).__name__.lower() and not isinstance(module, nn.modules.batchnorm._NormBase)
    # torch's own layer norm saves its input, in its dtype, and two numbers a token: nothing to gain.
    is_fused = type(module).forward is nn.LayerNorm.forward
    return of_features and is_leaf and named and not is_fused and _takes_one_input(module)


def _mlps(block: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules of a block that look like an MLP: two linear layers and more, nothing random, one input."""
    for child in block.children():
        if _looks_like_mlp(child):
            yield child
        else:
            yield from _mlps(child)


def _looks_like_mlp(module: nn.Module) -> bool:
    if any(name in _ATTENTION for name, _ in module.named_children()):
        return False
    leaves = [each for each in module.modules() if not any(True for _ in each.children())]
    linear = [each for each in leaves if _is_linear(each)]
    others = [each for each in leaves if each not in linear and any(True for _ in each.parameters())]
    random = [each for each in leaves if isinstance(each, nn.modules.dropout._DropoutNd) and each.p > 0]
    own = [
        each for each in module.modules() if each not in leaves and any(True for _ in each.parameters(recurse=False))
    ]
    return len(linear) > 1 and not others and not random and not own and _takes_one_input(module)


def _is_linear(module: nn.Module) -> bool:
    # transformers' Conv1D, of GPT-2, is a linear layer whose weight is transposed.
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _takes_one_input(module: nn.Module) -> bool:
    parameters = list(inspect.signature(module.forward).parameters.values())
    named = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return len(parameters) == len(named) == 1


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a part of an MLP has a hook, which would see tiles. Those of the MLP itself see all tokens."""
    return any(
        each._forward_hooks or each._forward_pre_hooks or each._backward_hooks
        for each in module.modules()
        if each is not module
    )
