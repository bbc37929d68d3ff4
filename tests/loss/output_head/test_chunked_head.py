"""A cross entropy over chunks of tokens is that of the logits, in value and every gradient; against plain autograd, float64, 1e-12."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_sp import SequenceParallelError, linear_cross_entropy
from lightning_sp.loss.output_head.chunked_head import auto_chunk_tokens, chunk_bytes
from lightning_sp.loss.output_head.deferred_logits import DeferredLogits
from lightning_sp.loss.output_head.head_call import HeadCall
from lightning_sp.loss.reduction import losses_of_tokens, sum_and_count
from lightning_sp.testing import max_error

ROWS, TOKENS, DIM, VOCAB = 2, 7, 8, 12
NUM = ROWS * TOKENS


def head_and_hidden(*, bias=True, dtype=torch.float64, frozen=()):
    torch.manual_seed(1)
    head, hidden = nn.Linear(DIM, VOCAB, bias=bias, dtype=dtype), torch.randn(ROWS, TOKENS, DIM, dtype=dtype)
    head.weight.requires_grad_("weight" not in frozen)
    return head, hidden.requires_grad_("hidden" not in frozen)


def deferred(head, hidden, chunk_tokens=5):
    return DeferredLogits.of(HeadCall(head, hidden, chunk_tokens), hidden)


def targets(kind):
    torch.manual_seed(2)
    labels = torch.randint(0, VOCAB, (ROWS, TOKENS))
    labels[0, 2] = labels[1, :3] = -100
    if kind == "probabilities":
        return torch.rand(NUM, VOCAB, dtype=torch.float64).softmax(-1)
    return torch.full_like(labels, -100).flatten() if kind == "ignored" else labels.flatten()


def gradients(loss, head, hidden, weights=None, **options):
    loss = loss if weights is None else (loss * weights).sum()
    wanted = [each for each in (hidden, *head.parameters()) if each.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, wanted, **options)]


CLASSES = torch.linspace(0.1, 1.0, VOCAB, dtype=torch.float64)
TARGETS = ["tokens", "ignored", "probabilities"]
OPTIONS = [{}, dict(label_smoothing=0.2), dict(weight=CLASSES), dict(weight=CLASSES, label_smoothing=0.1)]
FUNCTIONS = [lambda x: x, lambda x: 3 * torch.tanh(x.double() / 3) + CLASSES]


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("chunk_tokens", [1, 5, 14, 100])
def test_sums_and_losses_of_tokens_are_those_of_the_logits(kind, chunk_tokens):
    target, upstream = targets(kind), torch.linspace(-1, 1, NUM, dtype=torch.float64)
    for options, function, frozen, bias in itertools.product(
        OPTIONS, FUNCTIONS, [(), ("weight",), ("hidden",)], [True, False]
    ):
        if frozen and options:
            continue
        head, hidden = head_and_hidden(bias=bias, frozen=frozen)
        each = F.cross_entropy(function(head(hidden)).flatten(0, 1), target, reduction="none", **options)
        logits = function(deferred(head, hidden, chunk_tokens)).flatten(0, 1)
        total, _ = sum_and_count(
            partial(F.cross_entropy, **{n: v for n, v in options.items() if n != "weight"}),
            logits,
            target,
            options.get("weight"),
            -100,
        )
        for own, wanted, weights in (
            (total, each.sum(), None),
            (
                losses_of_tokens(partial(F.cross_entropy, reduction="none", **options), logits, target, None),
                each,
                upstream,
            ),
        ):
            pairs = zip(
                gradients(own, head, hidden, weights),
                gradients(wanted, head, hidden, weights, retain_graph=True),
                strict=True,
            )
            assert max(max_error(a, b) for a, b in pairs) < 1e-12, (options, frozen, bias)
        assert not logits.is_made


def test_the_mean_over_one_process_by_the_public_function():
    head, hidden = head_and_hidden()
    target = targets("tokens").view(ROWS, TOKENS)
    wanted = gradients(F.cross_entropy(head(hidden).tanh().flatten(0, 1), target.flatten()), head, hidden)
    own = linear_cross_entropy(hidden, head, target, transform=torch.tanh, chunk_tokens=4)
    assert max(map(max_error, gradients(own, head, hidden), wanted)) < 1e-12
    assert "forward" not in vars(head)
    with pytest.raises(SequenceParallelError, match=r"hidden states \(2, 7, 8\) and the head Linear\(4, 3\)"):
        linear_cross_entropy(hidden, nn.Linear(4, 3), target)


def test_a_second_backward_finds_the_same_and_one_of_second_order_is_refused():
    head, hidden = head_and_hidden()
    total = deferred(head, hidden).summed(lambda logits: logits.logsumexp(-1))
    first = gradients(2 * total, head, hidden, retain_graph=True)
    assert all(
        torch.equal(a, b) for a, b in zip(first, gradients(2 * total, head, hidden, retain_graph=True), strict=True)
    )
    with pytest.raises(SequenceParallelError, match="create_graph=True"):
        gradients(total, head, hidden, create_graph=True)
    gradients(total, head, hidden)
    with pytest.raises(RuntimeError, match="second time"):
        gradients(total, head, hidden)


@pytest.mark.parametrize("mixed", [True, False])
def test_bfloat16_is_off_by_at_most_twice_what_logits_are(mixed):
    target, errors = targets("tokens"), []
    head, hidden = head_and_hidden(dtype=torch.float32)
    exact = gradients(F.cross_entropy(head(hidden).flatten(0, 1), target), head, hidden)
    if not mixed:
        head, hidden = head.bfloat16(), hidden.detach().bfloat16().requires_grad_()
    for make in (nn.Linear.__call__, deferred):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            logits = make(head, hidden)
            total, count = sum_and_count(F.cross_entropy, logits.float().flatten(0, 1), target, None, -100)
        found = gradients(total / count, head, hidden)
        assert [each.dtype for each in found[1:]] == [hidden.dtype, *(p.dtype for p in head.parameters())]
        errors.append([float((a.float() - b).norm()) for a, b in zip(found, exact, strict=True)])
    assert logits.dtype == torch.bfloat16
    assert all(own <= 2 * plain + 1e-6 for plain, own in zip(*errors, strict=True)), errors


@pytest.mark.parametrize(
    ("device", "vocabulary", "tokens"), [("cpu", 32_000, 262), ("cpu", 256_000, 64), ("cuda", 128_256, 1046)]
)
def test_a_chunk_is_larger_on_a_device_and_its_bytes_are_known(device, vocabulary, tokens):
    where = torch.device(device)
    assert auto_chunk_tokens(vocabulary, where) == tokens
    assert chunk_bytes(vocabulary, "auto", 10_000, where) == 10 * vocabulary * tokens
    assert chunk_bytes(vocabulary, "auto", 60, where) == 600 * vocabulary
    assert chunk_bytes(vocabulary, 5, 60, where) == 50 * vocabulary
    assert chunk_bytes(vocabulary, None, 60, where) == chunk_bytes(0, "auto", 60, where) == 0
