"""Logits that a step writes to, whole or by a view, or asks for their gradient: what follows sees what it would have seen of real ones."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_sp import SequenceParallelError
from lightning_sp.testing import max_error
from tests.loss.output_head.test_chunked_head import NUM, VOCAB, deferred, gradients, head_and_hidden, targets


def loss(logits, labels):
    """As a loss of a step reads them: over chunks, where the logits may wait."""
    from lightning_sp.loss.reduction import sum_and_count

    flat = logits.reshape(-1, VOCAB)
    return sum_and_count(torch.nn.functional.cross_entropy, flat, labels, None, -100)[0]


def _view_of_part(x, y):
    x[:, :-1].mul_(0.5)
    return loss(x, y)


def _part_of_words_of_part(x, y):
    part = x[:, 2:]
    part[..., 0] = -5.0
    return loss(x, y)


def _last_token_by_another_view(x, y):
    x[:, -1].unsqueeze(0).mul_(0.5)
    return loss(x, y)


def _whole_after_a_view(x, y):
    flat = x.view(-1, VOCAB)
    x.mul_(0.5)
    return loss(flat, y)


def _whole_by_a_view_of_it(x, y):
    flat = x.view(-1, VOCAB)
    x.unsqueeze(0).mul_(0.5)
    return loss(flat, y)


def _after_what_was_made_of_it(x, y):
    halved, log = x / 2.0, x.log_softmax(-1)
    x.masked_fill_(torch.arange(VOCAB) < 5, -3.0)
    return loss(x, y) + halved.square().mean() + log[..., 0].mean()


def _after_a_copy(x, y):
    chosen = x[torch.arange(x.shape[0])]
    x.mul_(0.5)
    return loss(x, y) + chosen.square().mean()


def _data(x, y):
    x.data = x.data * 2
    return loss(x, y)


def _moved_and_made_contiguous(x, y):
    moved = x.transpose(1, 2).contiguous()
    x.mul_(0.5)
    return moved.square().mean() + loss(x, y)


def _index_changed_since(x, y):
    keep = torch.arange(x.shape[1]) > 1
    part, total = x.detach()[:, keep], x.sum()
    keep.zero_()
    return part.square().mean() + total


def _checkpointed(x, y):
    return checkpoint(loss, x, y, use_reentrant=False)


def _checkpointed_under_hooks(x, y):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return checkpoint(loss, x, y, use_reentrant=False)


def _compiled(x, y):
    return torch.compile(lambda a: (a * 2).tanh().mean(-1), backend="aot_eager")(x).square().sum() + loss(x, y)


def _hook_before(x, y):
    x.register_hook(lambda gradient: gradient * 2)
    return loss(x, y)


def _hook_after_a_view(x, y):
    flat = x.view(-1, VOCAB)
    x.register_hook(lambda gradient: gradient * 2)
    return loss(flat, y)


def _by_numpy(x, y):
    x.detach().numpy()[..., 3] = -7.0
    return loss(x, y)


def _by_its_storage(x, y):
    x.detach().untyped_storage().fill_(0)
    return loss(x, y)


def _dropped_in_place(x, y):
    torch.manual_seed(0)
    part = torch.nn.functional.dropout(x[:, 2:], 0.3, True, inplace=True)
    return part.square().mean() + loss(x, y)


def _named_number_changed_since(x, y):
    of_words = torch.ones(VOCAB, dtype=x.dtype)
    later = torch.add(x, other=of_words)
    of_words.zero_()
    return later.square().mean()


STEPS = (
    _by_numpy, _by_its_storage, _dropped_in_place, _named_number_changed_since,
    _view_of_part, _part_of_words_of_part, _last_token_by_another_view, _whole_after_a_view, _whole_by_a_view_of_it,
    _after_what_was_made_of_it, _after_a_copy, _data, _moved_and_made_contiguous, _index_changed_since, _checkpointed,
    _checkpointed_under_hooks, _compiled, _hook_before, _hook_after_a_view,
)  # fmt: skip


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__.strip("_"))
def test_a_step_is_that_of_real_logits(step):
    labels = targets("tokens")
    found = []
    for make in (deferred, lambda head, hidden: head(hidden)):
        head, hidden = head_and_hidden()
        total = step(make(head, hidden), labels)
        found.append([total.detach(), *gradients(total, head, hidden)])
    assert max(map(max_error, *found)) < 1e-12, step


@pytest.mark.parametrize(
    "ask",
    [
        lambda x, total: x.register_hook(lambda gradient: gradient),
        lambda x, total: x.retain_grad(),
        lambda x, total: torch.autograd.grad(total, x),
    ],
    ids=["hook", "retain_grad", "autograd.grad"],
)
def test_their_gradient_is_not_to_be_had_after_a_loss(ask):
    head, hidden = head_and_hidden()
    logits = deferred(head, hidden)
    total = loss(logits, targets("tokens"))
    with pytest.raises(
        SequenceParallelError, match=r"a loss was computed already.*ask before the loss is computed, or give loss_chunk"
    ):
        ask(logits, total)
    assert len(targets("tokens")) == NUM
