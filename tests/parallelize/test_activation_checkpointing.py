"""Checkpoint policies change no bit of a gradient; all but "full" repeat neither a kernel of the attention nor a message."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_sp.parallelize.activation_checkpointing import checkpoint_blocks
from lightning_sp.parallelize.tiled_mlp import TiledMLP
from lightning_sp.testing import max_error
from tests.parallelize import checkpointing_ranks as ranks

LAYOUTS = {
    "ulysses": dict(ulysses_size=2),
    "ring": dict(ring_size=2),
    "ring, network": dict(ring_size=2, ring_transport="network"),
}
POLICIES = ("none", "selective", "every_2", "full")


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
        assert [each["of_block"] for each in others] == [["selective"] * 2, ["selective", "none"], ["full"] * 2]


@pytest.mark.parametrize(
    ("build", "strategy", "options"),
    [
        pytest.param("cross", dict(ulysses_size=2), {}, marks=pytest.mark.slow),  # keywords, tuples, dropout
        pytest.param("cross", dict(ring_size=2), {}, marks=pytest.mark.slow),
        ("dropout gpt", dict(ring_size=2, shard_size=1), {}),
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


class OwnDtype(nn.Module):
    """A block that makes a tensor in the default dtype, which a true precision sets in the forward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.up(x).tanh() * torch.full((8,), 0.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("tiles", [False, True])
def test_a_block_is_recomputed_in_the_default_dtype_of_its_forward(policy, dtype, tiles):
    found = []
    for each in ("none", policy):
        torch.manual_seed(3)
        block = OwnDtype().to(dtype)
        x = torch.randn(2, 6, 8).to(dtype).requires_grad_()
        if tiles and each != "none":
            block.forward = TiledMLP(block, block.forward, 4)
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
    (False, "none", "selective"), (True, "none", "selective"), (False, "every_2", "selective"), (False, "full", "full"),
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
