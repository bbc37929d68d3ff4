"""Checkpoint policies change no bit of a gradient; all but "full" repeat neither a kernel of the attention nor a message."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.activation_checkpointing import checkpoint_blocks
from lightning_sp.parallelize.tiles import Tileable, TiledMLP
from lightning_sp.testing import max_error
from lightning_sp.weights.matmuls import is_kept, least_inner_size
from tests.parallelize import checkpointing_ranks as ranks

aten = torch.ops.aten
LAYOUTS = {
    "ulysses": dict(ulysses_size=2),
    "ring": dict(ring_size=2),
    "ring, network": dict(ring_size=2, ring_transport="network"),
}
POLICIES = ("none", "matmuls", "selective", "every_2", "full")


def same_bits(actual, expected, case):
    assert actual["losses"] == expected["losses"], case
    assert len(actual["grads"]) == len(expected["grads"]) > 0
    for ours, theirs in zip(actual["grads"], expected["grads"], strict=True):
        assert ours.keys() == theirs.keys()
        for name, grad in theirs.items():
            assert torch.equal(ours[name], grad), (case, name)


@pytest.mark.parametrize(
    "layout", ["ulysses", *(pytest.param(each, marks=pytest.mark.slow) for each in ("ring", "ring, network"))]
)
def test_every_policy_gives_the_same_bits_and_those_of_one_process(pools, layout):
    (alone,) = pools(1).run(ranks.steps, "llama", 1, {})
    cases = [
        dict(build="llama", world=2, strategy={**LAYOUTS[layout], "activation_checkpointing": policy})
        for policy in POLICIES
    ]
    for plain, *others in pools(2).run(ranks.all_steps, cases):
        for step, one in zip(plain["grads"], alone["grads"], strict=True):
            assert all(max_error(step[name], grad) < 1e-10 for name, grad in one.items())
        assert plain["of_block"] == ["none", "none"]
        for policy, found in zip(POLICIES[1:], others, strict=True):
            same_bits(found, plain, (layout, policy))
            times = 2 if policy == "full" else 1
            assert found["kernels"] == times * plain["kernels"] > 0, policy
        of_blocks = [["matmuls"] * 2, ["selective"] * 2, ["selective", "none"], ["full"] * 2]
        assert [each["of_block"] for each in others] == of_blocks


@pytest.mark.parametrize(
    ("build", "strategy", "options"),
    [
        pytest.param("cross", dict(ulysses_size=2), {}, marks=pytest.mark.slow),  # keywords, tuples, dropout
        pytest.param("cross", dict(ring_size=2), {}, marks=pytest.mark.slow),
        pytest.param("dropout gpt", dict(ring_size=2, shard_size=1), {}, marks=pytest.mark.slow),
        pytest.param("llama", dict(ulysses_size=2), dict(precision="bf16-mixed"), marks=pytest.mark.slow),  # autocast
        ("llama", dict(ulysses_size=2, ulysses_stages=2), dict(accumulate_grad_batches=2, max_steps=1)),
    ],
)
def test_what_blocks_take_return_and_draw_is_repeated(pools, build, strategy, options):
    cases = [
        dict(build=build, world=2, strategy={**strategy, "activation_checkpointing": policy}, **options)
        for policy in ("none", "selective", "full")
    ]
    for plain, selective, full in pools(2).run(ranks.all_steps, cases):
        same_bits(selective, plain, (build, strategy, "selective"))
        same_bits(full, plain, (build, strategy, "full"))
        assert selective["kernels"] == plain["kernels"]
        assert selective["exchanges"] == plain["exchanges"]


def test_in_tiles_an_mlp_keeps_no_product(pools):
    cases = [
        dict(build="llama", world=2, strategy=dict(ulysses_size=2, mlp_tile_tokens=8, activation_checkpointing=policy))
        for policy in ("none", "matmuls")
    ]
    for plain, found in pools(2).run(ranks.all_steps, cases):
        same_bits(found, plain, "tiles")
        assert found["of_block"] == ["matmuls"] * 2


class OwnDtype(nn.Module):
    """A block that makes a tensor in the default dtype, which a true precision sets in the forward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.up(x).tanh() * torch.full((8,), 0.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("policy", ["matmuls", "selective", "full"])
@pytest.mark.parametrize("tiles", [False, True])
def test_a_block_is_recomputed_in_the_default_dtype_of_its_forward(policy, dtype, tiles):
    found = []
    for each in ("none", policy):
        torch.manual_seed(3)
        block = OwnDtype().to(dtype)
        x = torch.randn(2, 6, 8).to(dtype).requires_grad_()
        if tiles and each != "none":
            block.forward = TiledMLP(Tileable(module=block, inputs=("x",)), block.forward, 4)
        model = nn.Sequential(block)
        checkpoint_blocks(model, [block], each)
        torch.set_default_dtype(dtype)
        try:
            out = model(x)
        finally:
            torch.set_default_dtype(torch.float32)
        out.sum().backward()
        assert torch.get_default_dtype() == torch.float32
        found.append((out.detach(), x.grad))
    (out, grad), (again, grad_again) = found
    assert torch.equal(out, again) or tiles
    torch.testing.assert_close(grad_again, grad)


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


class Mlp(nn.Module):
    """A block with two products of its width, two of a low rank, and a sum that may be written in place."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
        self.a, self.b = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)
        self.in_place = in_place

    def forward(self, x):
        y = self.down(torch.tanh(self.up(x)))
        if self.in_place:
            y += x
        return torch.sin(y + self.b(self.a(x)))


def stepped(policy, **options):
    """Return the output, the gradients and the products of one step of two blocks."""
    torch.manual_seed(3)
    blocks = [Mlp(**options), Mlp(**options)]
    model, x = nn.Sequential(*blocks), torch.randn(1, 5, 32)
    checkpoint_blocks(model, blocks, policy)
    with Products() as products:
        out = model(x)
        out.sum().backward()
    return out.detach(), [each.grad for each in model.parameters()], products.number


def test_products_that_cost_more_than_their_bytes_are_computed_once():
    out, grads, plain = stepped("none")
    for policy, again in (("matmuls", 2 * 1), ("selective", 2 * 4)):
        found, found_grads, products = stepped(policy)
        assert torch.equal(found, out)
        assert all(map(torch.equal, found_grads, grads))
        assert products == plain + again, policy  # of a rank of 4 the product is computed again, and its input kept


@pytest.mark.parametrize(
    ("operator", "shapes", "kept"),
    [
        (aten.mm, [(5, 16), (16, 3)], True),
        (aten.mm, [(5, 15), (15, 3)], False),
        (aten.addmm, [(3,), (5, 16), (16, 3)], True),
        (aten.addmm, [(30,), (5, 15), (15, 30)], False),
        (aten.bmm, [(2, 5, 16), (2, 16, 3)], True),
        (aten.convolution, [(1, 4, 9), (6, 4, 4)], True),
        (aten.convolution, [(1, 4, 9), (6, 4, 3)], False),
        (aten.add, [(5, 16), (5, 16)], False),
    ],
)
def test_products_are_kept_by_their_inner_size(operator, shapes, kept):
    overload = operator.Tensor if operator is aten.add else operator.default
    assert is_kept(overload, [torch.ones(shape) for shape in shapes]) == kept


def test_on_a_gpu_a_product_is_kept_that_costs_as_much_as_the_bytes_of_its_result():
    assert [least_inner_size(torch.device(name)) for name in ("cuda", "cpu")] == [512, 16]


def test_a_block_that_writes_to_a_products_result_is_refused_by_name():
    with pytest.raises(SequenceParallelError, match=r"'matmuls': Mlp writes in place .*='selective'"):
        stepped("matmuls", in_place=True)
    out, grads, _ = stepped("none", in_place=True)
    found, found_grads, _ = stepped("selective", in_place=True)
    assert torch.equal(found, out)
    assert all(map(torch.equal, found_grads, grads))


class Heads(nn.Module):
    """A block that returns a product, and what it makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, bias=False)

    def forward(self, x):
        y = self.linear(x)
        return y, (y * y).sum(-1)


def test_what_a_block_returns_may_be_written_to_behind_it():
    found = []
    for policy in ("none", "matmuls"):
        torch.manual_seed(3)
        block, x = Heads(), torch.randn(1, 5, 32)
        checkpoint_blocks(block, [block], policy)
        y, squares = block(x)
        if policy == "matmuls":
            y.add_(1)  # a plain step may not: the product is saved there
        (squares.sum() + y.sum()).backward()
        found.append(block.linear.weight.grad)
    assert torch.equal(*found)


@functools.cache
def table():
    """Multiply at the first call alone. What a function of Python's keeps for itself cannot be shown again."""
    return torch.ones(5, 1) @ torch.ones(1, 32)


class Lazy(nn.Module):
    """A block that multiplies something at its first call alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x):
        return torch.sin(self.second(torch.sin(self.first(x[0] * table()))))[None]


def test_a_block_that_runs_other_products_when_it_is_recomputed_is_refused_by_name():
    block, x = Lazy(), torch.randn(1, 5, 32)
    checkpoint_blocks(block, [block], "matmuls")
    with pytest.raises(SequenceParallelError, match=r"'matmuls': Lazy runs .* in its backward .*='selective'"):
        block(x).sum().backward()
    block.zero_grad()
    block(x).sum().backward()  # from the second step on it runs the same
    assert block.first.weight.grad is not None


def test_full_repeats_the_exchanges_of_a_forward(pools):
    cases = [
        dict(build="llama", world=2, strategy=dict(ulysses_size=2, activation_checkpointing=policy), max_steps=1)
        for policy in ("none", "selective", "full")
    ]
    for plain, selective, full in pools(2).run(ranks.all_steps, cases):
        assert selective["exchanges"] == plain["exchanges"]
        # Of two blocks: what goes to the heads, and comes back.
        assert full["exchanges"] == plain["exchanges"] + 2 * 2


def test_blocks_under_torch_compile(pools):
    # Selective: tests/trainer/compile/test_user_compile.py.
    cases = [
        dict(build=build, world=2, strategy=dict(ulysses_size=2, activation_checkpointing=policy), max_steps=1)
        for build, policy in (("llama", "none"), ("compiled", "full"))
    ]
    for plain, full in pools(2).run(ranks.all_steps, cases):
        assert full["losses"] == pytest.approx(plain["losses"], abs=1e-10)
        for name, grad in plain["grads"][0].items():
            assert max_error(full["grads"][0][name], grad) < 1e-10, name


@pytest.mark.parametrize(("late", "policy", "found"), [
    (False, "none", "selective"), (True, "none", "selective"),
    pytest.param(False, "every_2", "selective", marks=pytest.mark.slow), pytest.param(False, "full", "full", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_models_own_checkpointing_is_taken_over(pools, late, policy, found):
    build = "hugging face" if late else "hugging face, checkpointed"
    cases = [
        dict(build=each, world=2, strategy=dict(ring_size=2, activation_checkpointing=of), late=later)
        for each, of, later in ((build, policy, late), ("hugging face", "none", False))
    ]
    for rank, (taken, plain) in enumerate(pools(2).run(ranks.all_steps, cases)):
        same_bits(taken, plain, policy)
        assert taken["of_block"] == [found] * 2
        assert taken["kernels"] == plain["kernels"] * (2 if policy == "full" else 1)
        assert len(taken["told"]) == (rank == 0), taken["told"]
        if rank == 0:
            assert "LlamaForCausalLM in place of its own gradient checkpointing" in taken["told"][0]
            assert taken["told"][0].endswith(f"activation_checkpointing={found}")


@pytest.mark.parametrize("policy", ["none", "selective", "full", "every_2"])
def test_compiled_blocks_of_a_kind_share_one_graph(policy):
    """torch.compile makes eight graphs of a function at most, and runs it as it is written from there on."""
    torch.compiler.reset()
    counters.clear()
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(6))
    checkpoint_blocks(blocks, list(blocks), policy)
    for block in blocks:
        block.compile(backend="aot_eager")
    for block in blocks:
        block(torch.ones(2, 4)).sum().backward()
    assert counters["stats"]["unique_graphs"] == (2 if policy == "every_2" else 1)
