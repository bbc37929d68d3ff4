"""What a step leaves for its backward: what grows with its tokens, and casts of weights, which do not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_sp.models import Llama, LlamaConfig
from lightning_sp.parallelize.activation_checkpointing import (
    BlockCheckpoints,
    checkpoint_blocks,
    measured_step,
    refuses_measuring,
)
from lightning_sp.parallelize.memory.activation_bytes import ActivationBytes
from lightning_sp.parallelize.memory.memory_prediction import StepBytes, step_bytes
from lightning_sp.parallelize.tiles import MlpTiles
from lightning_sp.weights.autocast import AutocastWeight, WeightReads
from tests.instruments.live_storages import LiveStorages
from tests.parallelize.mixtures import Experts, Mixture

WIDTH = 32
WEIGHT = WIDTH * WIDTH * 2  # bytes of a square one in bfloat16
OF_BLOCK = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    """One weight, used as it is told."""

    def __init__(self, use: OF_BLOCK) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.linear, x)


class Blocks(nn.Module):
    """Two blocks, and one weight outside of them."""

    def __init__(self, use: OF_BLOCK) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(use), Block(use)])
        self.outside = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.outside(x)


def measured(
    model: nn.Module, blocks: nn.ModuleList, run: Callable[[], Any], tokens: int, **autocast: Any
) -> StepBytes:
    activations = ActivationBytes(len(blocks))
    for number, block in enumerate(blocks):
        forward = type(block).forward.__get__(block)
        block.forward = lambda *args, n=number, b=block, f=forward, **kwargs: activations.of_block(
            n, b, f, args, kwargs
        )
    autocast = {"dtype": torch.bfloat16, "cache_enabled": False, **autocast}
    with torch.autocast("cpu", **autocast), activations.measured(model, tokens):
        held = run()
    assert activations.step is not None
    del held
    return activations.step


def of_blocks(use: OF_BLOCK, tokens: int, model: Blocks | None = None, **autocast: Any) -> StepBytes:
    model = model or Blocks(use)
    return measured(
        model, model.blocks, lambda: model(torch.ones(tokens, WIDTH, requires_grad=True)), tokens, **autocast
    )


@pytest.mark.parametrize("cache_enabled", [False, True])
def test_a_token_of_a_llamas_block_leaves_as_much_in_a_crop_as_in_a_step(cache_enabled):
    model = Llama(LlamaConfig(vocab_size=97, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=96))

    def step(tokens: int) -> StepBytes:
        ids, positions = torch.zeros(1, tokens, dtype=torch.long), torch.arange(tokens)[None]
        run = partial(model, ids, position_ids=positions)
        return measured(model, model.layers, run, tokens, cache_enabled=cache_enabled)

    steps = [step(tokens) for tokens in (64, 128, 512)]
    assert {step.blocks[0].kept / step.tokens for step in steps} == {steps[0].blocks[0].kept / 64}
    casts = 2 * sum(p.numel() for p in model.layers[0].parameters() if p.dim() == 2)
    head = 2 * 97 * 64
    for each in steps:
        # What autocast keeps is there under every policy: it is not the blocks' own.
        assert [block.casts for block in each.blocks] == [0 if cache_enabled else casts] * 2
        assert each.outside_casts == head + (2 * casts if cache_enabled else 0)


def wide_llama(num_layers: int, experts: bool = False) -> tuple[Llama, BlockCheckpoints]:
    """Return a model whose blocks are mostly MLP, or experts, and its checkpoints."""
    torch.manual_seed(0)
    size = dict(vocab_size=97, dim=64, num_heads=4, num_kv_heads=4, hidden_dim=1024)
    model = Llama(LlamaConfig(num_layers=num_layers, **size))
    for each in model.layers if experts else ():
        each.feed_forward = Mixture(Experts(64, 512))
    blocks = list(model.layers)
    return model, checkpoint_blocks(model, blocks, "auto", tiles=MlpTiles(blocks, model))


def run(model: Llama, tokens: int) -> Tensor:
    out: Tensor = model(torch.zeros(1, tokens, dtype=torch.long), position_ids=torch.arange(tokens)[None])
    return out


@pytest.mark.parametrize("tokens", [48, 512])
@pytest.mark.parametrize("in_half", [False, True])
def test_what_is_wide_in_the_mlp_of_a_block_and_in_a_tile_of_it_is_known(tokens, in_half):
    model, checkpoints = wide_llama(2)
    cast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if in_half else nullcontext()
    with cast, measured_step(model, tokens):
        held = run(model, tokens)
    step = checkpoints.activations.step
    del held
    # gate, its silu, up and their product, of 1,024 features each, and in half the input's casts for gate and up. A tile has 64 tokens.
    wide = (4 * 1024 + 2 * 64) * 2 if in_half else 4 * 1024 * 4
    norms = 2 * (64 + 1) * 4  # of each the normalized features, and their scale
    for block in step.blocks:
        assert (block.wide, block.tile) == ((wide + norms) * tokens, wide * 64)
        assert block.kept > block.wide
    assert step.outside_wide == norms / 2 * tokens  # of the last one
    assert not any("forward" in vars(layer.feed_forward) for layer in model.layers)


def test_a_loss_of_logits_has_them_three_times_and_one_without_has_no_more_than_it_saves():
    found = []
    for has_loss in (False, True):
        model, checkpoints = wide_llama(1)
        with measured_step(model, 48):
            logits = run(model, 48)[0]
            held = F.cross_entropy(logits, torch.zeros(48, dtype=torch.long)) if has_loss else logits.sum()
        found.append(checkpoints.activations.step)
        del held, logits
    without, of_loss = found
    # The last norm's input, what it makes of it, its scale and its output; embedding's and loss' indices.
    assert without.outside == 48 * (3 * 64 + 1) * 4 + 48 * 8
    assert of_loss.outside - without.outside == 48 * 3 * 97 * 4 + 48 * 8 + 4


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("policy", ["none", "full", "full_tiled"])
def test_what_is_alive_in_a_step_is_no_more_than_predicted_and_not_far_from_it(policy, experts):
    model, checkpoints = wide_llama(3, experts)
    with measured_step(model, 64):
        held = run(model, 64)
    step = checkpoints.activations.step
    del held
    checkpoints.use(policy)
    run(model, 64).sum().backward()  # makes the gradients of weights
    weights = list(model.parameters())
    with LiveStorages([*weights, *(each.grad for each in weights), *model.buffers()]) as live:
        run(model, 256).sum().backward()
    # Each weight has its new gradient beside the sum for a moment; of experts both have, which add theirs up in the size of the whole.
    new = 2 * max(each.nbytes for each in weights) * (2 if experts else 1)
    assert 0.6 < live.peak_bytes / (step_bytes(policy, step, 256) + new) <= 1


def once(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def transposed(layer: nn.Module, x: Tensor) -> Tensor:
    return x @ layer.weight.t()


def in_parts(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([F.linear(x, part) for part in layer.weight.split(WIDTH // 4)], -1)


def some_parts(layer: nn.Module, x: Tensor) -> Tensor:
    return x + F.linear(x, layer.weight[:4]).sum(-1, keepdim=True)


def for_some_tokens(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([layer(part) for part in x.split(8)])


def expanded(layer: nn.Module, x: Tensor) -> Tensor:
    return (x[:, None] @ layer.weight.expand(len(x), WIDTH, WIDTH)).squeeze(1)


def of_an_activation(layer: nn.Module, x: Tensor) -> Tensor:
    return x @ (layer.weight * x[:1]).t()


def without_gradient(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        added = layer(x).float()
    return x.square() + added


@pytest.mark.parametrize(
    ("use", "casts", "kept"),
    [
        (once, WEIGHT, 0),
        (transposed, WEIGHT, 0),
        (in_parts, WEIGHT, 0),
        (some_parts, WEIGHT, 0),  # the next step may use all of it
        (for_some_tokens, WEIGHT, 7 * WEIGHT),  # each 8 tokens cast it again, the first of them aside
        (expanded, 0, 64 * WEIGHT),
        (of_an_activation, 0, WEIGHT),  # computed of it, and not it
        (without_gradient, 0, 0),  # freed
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_cast_of_a_weight_is_known_by_its_memory(use, casts, kept):
    step, longer = of_blocks(use, 64), of_blocks(use, 128)
    for each in (step, longer):
        assert [block.casts for block in each.blocks] == [casts] * 2
        assert each.outside_casts == WEIGHT
    found, of_longer = step.blocks[0].kept, longer.blocks[0].kept
    assert found >= kept
    if kept == 0:
        assert of_longer == 2 * found


def test_an_activation_in_the_shape_of_a_weight_is_none():
    step = of_blocks(lambda layer, x: F.linear(x.float().sin(), x.float().cos()), WIDTH)
    assert [block.casts for block in step.blocks] == [0, 0]
    # Both factors are saved in bfloat16, and what they are of.
    assert step.blocks[0].kept >= 2 * WEIGHT


def test_a_weight_of_two_blocks_is_cast_in_both():
    model = Blocks(once)
    model.blocks[1].linear.weight = model.blocks[0].linear.weight
    assert [block.casts for block in of_blocks(once, 8, model).blocks] == [WEIGHT, WEIGHT]
    kept = of_blocks(once, 8, model, cache_enabled=True)
    assert [block.casts for block in kept.blocks] == [0, 0]
    assert kept.outside_casts == 2 * WEIGHT  # once for both, and outside


def test_a_cast_that_was_made_before_a_block_is_no_activation_of_its():
    model = Blocks(once)
    x = torch.ones(8, WIDTH, requires_grad=True)

    def run() -> Tensor:
        first = model.blocks[0].linear(x)
        return model(x) + first

    step = measured(model, model.blocks, run, 8, cache_enabled=True)
    plain = of_blocks(once, 8, cache_enabled=True)
    assert step.blocks == plain.blocks
    assert step.outside_casts == plain.outside_casts == 3 * WEIGHT


@pytest.mark.parametrize("rounded", [False, True])
def test_weights_that_are_gathered_in_bfloat16_are_copied_too(rounded):
    model = Blocks(once)
    for block in model.blocks:
        numbers = block.linear.weight.detach()
        numbers = numbers.bfloat16() if rounded else numbers
        block.linear.weight = nn.Parameter(AutocastWeight(numbers, WeightReads("weight")))
    step = of_blocks(once, 8, model)
    assert [block.casts for block in step.blocks] == [WEIGHT, WEIGHT]
    assert step.blocks == of_blocks(once, 8).blocks


def test_in_float32_there_are_none():
    step = of_blocks(once, 8, enabled=False)
    assert [block.casts for block in step.blocks] == [0, 0]
    assert step.outside_casts == 0


def test_a_function_that_is_compiled_whole_is_measured_no_more():
    """Dynamo compiles nothing under a dispatch mode, and such a function asks for it."""
    model = nn.Sequential(nn.Linear(4, 4))
    checkpoint_blocks(model, [model[0]], "auto")
    whole = torch.compile(lambda x: x.sin() * 2, fullgraph=True, backend="eager")
    failed = []
    try:  # torch 2.11 runs it without compiling
        with measured_step(model, 3):
            whole(torch.ones(3))
    except RuntimeError as error:
        failed.append(error)
    assert all(refuses_measuring(model, error) for error in failed)
    with measured_step(model, 3):
        assert whole(torch.ones(3)).shape == (3,)
