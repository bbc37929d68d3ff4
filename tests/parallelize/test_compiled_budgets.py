"""Compiled blocks keep, of what they save for the backward, what costs the most to compute again for each byte, as far as a budget has room."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from lightning_sp import SequenceParallelStrategy
from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.activation_checkpointing import checkpoint_blocks
from lightning_sp.parallelize.memory.memory_prediction import OF_COMPILED, BlockBytes
from lightning_sp.testing import max_error
from tests.parallelize import checkpointing_ranks as ranks

TOKENS, WIDTH, WIDE = 48, 32, 256


class Mlp(nn.Module):
    """A block of two products whose results are saved: the second has an inner size eight times the first's."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE, bias=False), nn.Linear(WIDE, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + torch.sin(self.down(self.dropout(torch.sin(self.up(x)))))


def stepped(policy, *, dropout=0.0, layers=2, backend="aot_eager"):
    """Return the output, the gradients, and what the blocks save but the weights and the model's input."""
    torch.compiler.reset()
    torch.manual_seed(3)
    blocks = [Mlp(dropout) for _ in range(layers)]
    model, x = nn.Sequential(*blocks), torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    checkpoints = checkpoint_blocks(model, blocks, policy, backend=backend, measures=False)
    for block in blocks:
        block.compile(backend=checkpoints.compile_block)
    others = {each.untyped_storage()._cdata for each in (x, *model.parameters())}
    saved = {}

    def note(tensor):
        if tensor.untyped_storage()._cdata not in others:
            saved[tensor.untyped_storage()._cdata] = (tuple(tensor.shape), tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = model(x)
    out.sum().backward()
    return out.detach(), [x.grad, *(each.grad for each in model.parameters())], sorted(map(str, saved.values()))


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_budget_changes_no_bit(dropout):
    out, grads, _ = stepped("none", dropout=dropout)
    for percent in (75, 50, 25, 1):
        found, found_grads, _ = stepped(f"budget_{percent}", dropout=dropout)
        assert torch.equal(found, out), percent
        assert all(map(torch.equal, found_grads, grads)), percent


def test_what_is_dearest_for_its_bytes_is_kept_longest():
    wide, narrow = str(((TOKENS, WIDE), torch.float32)), str(((TOKENS, WIDTH), torch.float32))
    assert stepped("none", layers=1)[2] == [wide, wide, narrow]
    # Of 17 parts 16 are wide: a product of 32 operations for each of its numbers, and its sine. The narrow product has 256 for each.
    assert stepped("budget_20", layers=1)[2] == [narrow]
    assert stepped("budget_1", layers=1)[2] == []


def test_what_is_random_is_kept_whatever_the_budget():
    _, _, saved = stepped("budget_1", dropout=0.3, layers=1)
    assert str(((1, TOKENS, WIDE), torch.bool)) in saved


def test_what_a_budget_keeps_is_predicted():
    block = BlockBytes(kept=1000, attention=100, inputs=50)
    assert [block.under(f"budget_{percent}") for percent in (1, 50, 80, 99)] == [160, 625, 910, 1000]


def test_ranks_train_as_without_and_repeat_neither_attention_nor_messages(pools):
    cases = [
        dict(build="llama", world=2, strategy=dict(ulysses_size=2, activation_checkpointing="none")),
        *(
            dict(build="llama", world=2, strategy=dict(ulysses_size=2, compile=True, activation_checkpointing=policy), backend="aot_eager")
            for policy in ("none", "budget_50", "budget_10")
        ),
    ]  # fmt: skip
    for eager, *compiled in pools(2).run(ranks.all_steps, cases):
        for case, found in zip(cases[1:], compiled, strict=True):
            assert found["losses"] == pytest.approx(eager["losses"], abs=1e-10)
            for step, expected in zip(found["grads"], eager["grads"], strict=True):
                assert all(max_error(step[name], grad) < 1e-10 for name, grad in expected.items()), case
            assert found["kernels"] == eager["kernels"] > 0
            assert found["exchanges"] == eager["exchanges"] > 0
        assert [each["of_block"] for each in compiled] == [["none"] * 2, ["budget_50"] * 2, ["budget_10"] * 2]


def test_without_a_compiler_a_budget_is_refused():
    with pytest.raises(
        SequenceParallelError, match=r"^activation_checkpointing='budget_50' without compile=True: .*'every_2'"
    ):
        SequenceParallelStrategy(activation_checkpointing="budget_50")


def test_blocks_that_the_user_compiled_are_refused_a_budget():
    blocks = [Mlp(0.0)]
    with pytest.raises(SequenceParallelError, match=r"'budget_50': you have compiled .* compile=True, or use"):
        checkpoint_blocks(nn.Sequential(*blocks), blocks, "budget_50")


class Compiled(Mlp):
    """A block that fails where torch.compile has left it."""

    def forward(self, x):
        assert torch.compiler.is_compiling()
        return super().forward(x)


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=8)
def test_all_policies_in_turn_are_compiled():
    """Behind eight graphs of a function torch would run it as it is written."""
    torch.compiler.reset()
    counters.clear()
    blocks = [Compiled(0.0), Compiled(0.0)]
    model = nn.Sequential(*blocks)
    checkpoints = checkpoint_blocks(model, blocks, "none", backend="aot_eager", measures=False)
    for block in blocks:
        block.compile(backend=checkpoints.compile_block)
    for policy in OF_COMPILED:
        checkpoints.use(policy)
        for length in (TOKENS, 2 * TOKENS, 3 * TOKENS):
            x = torch.randn(1, length, WIDTH, requires_grad=True)
            model(x).sum().backward()
            with torch.no_grad():
                model(x)
    assert counters["stats"]["unique_graphs"] > 8


class Broken(Mlp):
    """A block that torch.compile leaves half way, and that writes in place to what products gave."""

    def forward(self, x):
        wide = self.up(x)
        wide += x.repeat(1, 1, WIDE // WIDTH)
        print(end="")
        narrow = self.down(self.dropout(torch.sin(wide)))
        narrow *= 2
        return x + torch.sin(narrow)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("policy", ["budget_50", "budget_1", "matmuls", "selective"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_what_the_compiler_leaves_recomputes_itself_selectively(policy, dropout):
    """From its second call on it takes what was decided before the place at which it leaves."""
    found = []
    for each in ("none", policy):
        torch.compiler.reset()
        torch.manual_seed(3)
        blocks, kept = [Broken(dropout), Broken(dropout)], []
        model = nn.Sequential(*blocks)
        for block in blocks if each != "none" else ():  # which is compared as it is written
            checkpoints = checkpoint_blocks(model, [block], each, backend="aot_eager", measures=False)
            block.compile(backend=checkpoints.compile_block)
        x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
        for _ in range(3):
            kept.clear()
            with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # noqa: B023
                out = model(x)
            out.sum().backward()
        wide = [t for t in kept if t.shape[-1] == WIDE and t.numel() == TOKENS * WIDE]
        found.append((out.detach(), [x.grad, *(p.grad for p in model.parameters())], len(wide)))
    (out, grads, plain), (again, grads_again, checkpointed) = found
    assert torch.equal(again, out)
    assert all(map(torch.equal, grads_again, grads))
    assert plain > 0
    assert checkpointed == 0
