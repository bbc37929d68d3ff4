"""MLPs in tiles of tokens: the same numbers, one tile's wide activations, and whole where a token needs others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sp.parallelize.functional_calls import functional_calls_of_whole_weights
from lightning_sp.parallelize.tiles import MlpTiles, TiledMLP, tile_mlps, without_tiles
from lightning_sp.testing import assert_sharded_equals_unsharded
from tests.trainer import scenarios
from tests.trainer.test_fit import same_run


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class OverTokens(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True))


class Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class WidestTensor(TorchDispatchMode):
    """Notes the most elements of a tensor with 24 features, the weights' gradients aside."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dim() > 1 and made.shape[-1] == 24 and made.shape != (8, 24):
            self.elements = max(self.elements, made.numel())
        return made


def gradients(block: nn.Module, x: Tensor) -> list[Tensor]:
    block.zero_grad()
    x = x.clone().requires_grad_()
    out = block(x)
    out.pow(2).sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in block.parameters())]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tile_tokens", [1, 6, 7, "auto", 64])
def test_tiles_give_what_the_whole_gives(rows, tile_tokens):
    torch.manual_seed(0)
    block, x = Block(MLP()).double(), torch.randn(rows, 23, 8, dtype=torch.float64)
    expected = gradients(block, x)
    assert tile_mlps([block], tile_tokens) == 1
    actual = gradients(block, x)
    assert_sharded_equals_unsharded(actual, expected, ["out", "x", *dict(block.named_parameters())])
    with WidestTensor() as widest:
        gradients(block, x)
    # With one token a tile each row has one.
    allowed = 23 * rows if tile_tokens == 64 else max(rows, 8 if tile_tokens == "auto" else tile_tokens)
    assert widest.elements <= 24 * allowed
    with without_tiles(block), WidestTensor() as widest:
        for one, other in zip(gradients(block, x), expected, strict=True):
            assert torch.equal(one, other)
    assert widest.elements == 24 * 23 * rows
    assert isinstance(block.mlp.forward, TiledMLP)


def test_an_mlp_that_looks_at_other_tokens_runs_whole_and_is_named():
    torch.manual_seed(0)
    block, x = Block(OverTokens()).double(), torch.randn(1, 40, 8, dtype=torch.float64)
    expected = gradients(block, x)
    tile_mlps([block], 4)
    with pytest.warns(UserWarning, match="mlp_tile_tokens: OverTokens does not take each token by itself"):
        actual = gradients(block, x)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


class HalfNorm(nn.Module):
    """A norm in float32, as of transformers' Llamas."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(hidden_states.dtype)


def test_a_norm_beside_an_mlp_saves_its_input_alone_and_one_of_single_heads_is_left_alone():
    block, x = Block(MLP()).bfloat16(), torch.randn(2, 64, 8, dtype=torch.bfloat16)
    block.norm, block.of_heads = HalfNorm(8).bfloat16(), HalfNorm(4).bfloat16()
    saved = []
    for tile_tokens in (None, 16):
        if tile_tokens is not None:
            tile_mlps([block], tile_tokens)
            block.norm(x)  # the first one tries
        held: dict[int, int] = {}

        def note(tensor: Tensor, held: dict[int, int] = held) -> Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            out = block.norm(x.clone().requires_grad_())
        saved.append(sum(held.values()))
        del out
    # Whole in float32 and normalized, beside scales; the weight; in tiles the input.
    assert saved[0] > 2 * 64 * 8 * 4 + 2 * 64 * 8 * 2
    assert saved[1] <= x.nbytes + 8 * 2
    assert "forward" not in vars(block.of_heads)
    other = Block(MLP())  # torch's own layer norm saves no more
    assert MlpTiles([other]).widths() == [(2 * 24, 8)]
    other.norm = HalfNorm(8)
    assert MlpTiles([other]).widths() == [(2 * 24 + 8, 8)]


def test_norms_of_a_block_and_behind_it_give_in_tiles_what_the_whole_gives():
    torch.manual_seed(0)
    block, x = Block(MLP()), torch.randn(3, 23, 8, dtype=torch.float64)
    block.norm = nn.RMSNorm(8)
    model = nn.Sequential(block, nn.RMSNorm(8), nn.Linear(8, 4), nn.RMSNorm(4)).double()
    expected = gradients(model, x)
    assert tile_mlps([block], 6, model) == 1
    actual = gradients(model, x)
    assert [isinstance(each.forward, TiledMLP) for each in (block.norm, *model[1:])] == [True, True, False, False]
    assert_sharded_equals_unsharded(actual, expected, ["out", "x", *dict(model.named_parameters())])


@pytest.mark.parametrize(
    "mlp",
    [
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)),
        nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
        nn.Sequential(nn.Linear(8, 8), nn.Conv1d(8, 8, 3), nn.Linear(8, 8)),
        nn.MultiheadAttention(8, 2),
    ],
    ids=["dropout", "one layer", "convolution", "attention"],
)
def test_what_is_no_mlp_is_left_alone(mlp):
    assert tile_mlps([Block(mlp)], 4) == 0


def test_a_hook_sees_whole_tensors():
    block, seen = Block(MLP()), []
    tile_mlps([block], 4)
    block.mlp.up.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    gradients(block, torch.randn(1, 16, 8))
    assert seen == [16]


def test_tiles_are_switched_between_steps_and_leave_nothing_behind():
    torch.manual_seed(0)
    block, x = Block(MLP()).double(), torch.randn(2, 23, 8, dtype=torch.float64)
    names, expected = ["out", "x", *dict(block.named_parameters())], gradients(block, x)
    tiles = MlpTiles([block])
    assert tiles.can_tile() == [True]
    tiles.use(True)
    gradients(block, x)  # the first one tries
    for on in (False, True, True, False, True, False):
        tiles.use(on)
        with WidestTensor() as widest:
            actual = gradients(block, x)
        assert widest.elements == 24 * (8 if on else 46)
        assert ("forward" in vars(block.mlp)) == on
        assert_sharded_equals_unsharded(actual, expected, names)
        assert on or all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_an_mlp_that_was_given_another_forward_has_it_again():
    block = Block(MLP())
    own = block.mlp.forward = block.mlp.forward
    tiles = MlpTiles([block])
    tiles.use(True)
    assert block.mlp.forward is not own
    tiles.use(False)
    assert block.mlp.forward is own
    # One that is given later is left alone.
    tiles.use(True)
    later = block.mlp.forward = lambda x: x
    tiles.use(False)
    assert block.mlp.forward is later


def test_blocks_without_an_mlp_and_one_that_looks_at_other_tokens_have_nothing_to_tile():
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    blocks = [Block(OverTokens()), Written(), Block(MLP())]
    tiles = MlpTiles(blocks)
    assert tiles.can_tile() == [True, False, True]
    assert tiles.widths() == [(48, 8), (0, 0), (48, 8)]
    tiles.use(True)
    with pytest.warns(UserWarning, match="it runs whole"):
        gradients(blocks[0], torch.randn(1, 40, 8))
    assert tiles.can_tile() == [False, False, True]
    blocks[2].mlp.up.register_forward_hook(lambda module, args, out: None)
    assert tiles.can_tile() == [False, False, False]


def test_an_mlp_that_is_called_by_the_name_of_its_input_runs_in_tiles():
    mlp = MLP().double()
    tile_mlps([Block(mlp)], 4)
    x = torch.randn(1, 16, 8, dtype=torch.float64, requires_grad=True)
    mlp(x=x)  # the first call tries
    with WidestTensor() as widest:
        mlp(x=x)
    assert widest.elements == 24 * 4


def test_a_call_with_other_weights_computes_no_tile_again():
    """The backward would compute it with the module's own."""
    torch.manual_seed(0)
    block, x, found = Block(MLP()).double(), torch.randn(1, 16, 8, dtype=torch.float64), []
    for tile_tokens in (None, 4):
        if tile_tokens is not None:
            tile_mlps([block], tile_tokens)
        weights = {name: (2 * p.detach()).requires_grad_() for name, p in block.named_parameters()}
        with functional_calls_of_whole_weights():
            for _ in range(2):  # the first one tries
                out = functional_call(block, weights, (x,)).square().sum()
        found.append([out.detach(), *torch.autograd.grad(out, list(weights.values()))])
    assert_sharded_equals_unsharded(found[1], found[0], ["out", *weights])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [dict(ulysses_size=2), dict(ring_size=2, activation_checkpointing=True)])
def test_a_model_of_hugging_face_trains_as_without(pools, strategy):
    cases = [
        dict(model="hugging face", world=2, strategy={**strategy, "preflight": False, **more}, data=dict(size=4))
        for more in ({}, {"mlp_tile_tokens": 8})
    ]
    for whole, tiled in pools(2).run(scenarios.fits, cases):
        same_run(tiled, whole)


class Counts(MLP):
    """Counts its calls, in a buffer that it reads, in a list, and in a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(8))
        self.seen: list[int] = []
        self.generator = torch.Generator().manual_seed(4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.data.add_(1)
        self.seen.append(1)
        noise = torch.rand(8, generator=self.generator, dtype=x.dtype)
        return super().forward(x) * self.calls.clone() * noise


@pytest.mark.parametrize("is_watched", [True, False])
def test_one_that_writes_to_what_it_keeps_runs_whole(is_watched):
    found = []
    for tiles in (False, True):
        torch.manual_seed(0)
        block, x = Block(Counts() if is_watched else MLP()).double(), torch.randn(1, 23, 8, dtype=torch.float64)
        if tiles:
            tile_mlps([block], 6)
        for _ in range(2):
            if tiles and is_watched and not block.mlp.seen:
                with pytest.warns(
                    UserWarning, match=r"Counts writes in its forward to what it keeps, .* it runs whole"
                ):
                    grads = gradients(block, x)
            else:
                grads = gradients(block, x)
        found.append([*grads, *block.buffers(), len(getattr(block.mlp, "seen", []))])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12) if isinstance(one, Tensor) else one == other
