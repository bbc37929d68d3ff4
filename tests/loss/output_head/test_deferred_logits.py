"""Whatever is asked of deferred logits is what the logits would have said, in value and gradient; and what is asked often makes none."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F

from lightning_sp import SequenceParallelError
from lightning_sp.testing import max_error
from tests.loss.output_head.test_chunked_head import (
    NUM,
    ROWS,
    TOKENS,
    VOCAB,
    deferred,
    gradients,
    head_and_hidden,
    targets,
)

INDEX = torch.arange(NUM).view(ROWS, TOKENS, 1) % VOCAB
KEEP = INDEX[..., 0] > 2


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, upstream):
        return 2 * ctx.saved_tensors[0] * upstream


# Known: the logits are not made.
RECORDED = {
    "logsumexp": lambda x: x.logsumexp(-1).square(),
    "log probabilities": lambda x: x.log_softmax(-1).gather(-1, INDEX).squeeze(-1),
    "argmax": lambda x: x.detach().argmax(-1) + 0.0 * x.logsumexp(-1),
    "a part": lambda x: (x[..., :-1, :].float().double() / 2).contiguous().view(-1, VOCAB).logsumexp(-1),
    "kept": lambda x: x[KEEP].logsumexp(-1),
    "pieces": lambda x: torch.cat([each.flatten(0, 1).logsumexp(-1) for each in x.split(3, 1)]),
    "rows": lambda x: torch.stack([each.logsumexp(-1) for each in x]),
    "moved": lambda x: x.movedim(-1, 1).transpose(1, 2).logsumexp(-1),
}  # fmt: skip
MAKING = {
    "a part of the words": lambda x: x[..., :3],
    "one token": lambda x: x[0, 1],
    "a parameter": lambda x: x * torch.ones(1, dtype=torch.float64, requires_grad=True),
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "in place": lambda x: x.clone().mul_(2),
    "others' functions": lambda x: _Square.apply(x / 2),
    "reshaped": lambda x: x.view(ROWS, -1),
    "moved": lambda x: x.movedim(-1, 1).softmax(1),
    "for each token": lambda x: x / torch.arange(1, TOKENS + 1).view(1, -1, 1),
    "a piece of pieces": lambda x: x.split(3, 1)[1].square(),
}  # fmt: skip


@pytest.mark.parametrize("name", [*RECORDED, *MAKING])
def test_an_answer_is_that_of_the_logits(name):
    ask = {**RECORDED, **MAKING}[name] if name != "moved" else RECORDED[name]
    for each in {ask, MAKING.get(name, ask)}:
        head, hidden = head_and_hidden()
        wanted = each(head(hidden))
        logits = deferred(head, hidden)
        own = each(logits)
        assert (own.shape, own.dtype, own.requires_grad) == (wanted.shape, wanted.dtype, wanted.requires_grad)
        weights = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view(wanted.shape)
        found, exact = gradients(own, head, hidden, weights), gradients(wanted, head, hidden, weights)
        assert max(map(max_error, found, exact)) < 1e-12
        assert each is not RECORDED.get(name) or not logits.is_made


def test_logits_are_made_once_and_asked_for_their_shape_without():
    head, hidden = head_and_hidden()
    logits = deferred(head, hidden)
    assert (logits.shape, logits.size(-1), logits.dim(), len(logits)) == ((ROWS, TOKENS, VOCAB), VOCAB, 3, ROWS)
    assert (logits.dtype, logits.requires_grad, logits.is_leaf) == (torch.float64, True, False)
    assert not logits.is_made
    assert torch.equal(logits[..., :2], head(hidden)[..., :2])
    assert logits.make() is logits.make()
    with torch.no_grad():
        assert not logits.softmax(-1).requires_grad
    for again in (copy.copy(logits.detach()), pickle.loads(pickle.dumps(logits.detach()))):
        assert torch.equal(again, head(hidden))


def test_what_is_taken_without_a_graph_has_none():
    head, hidden = head_and_hidden()
    logits = deferred(head, hidden)
    with torch.no_grad():
        part = logits[:, 1:]
    assert not part.requires_grad
    assert not part.flatten(0, 1).summed(lambda x: x.logsumexp(-1)).requires_grad
    assert logits.requires_grad


def test_hidden_states_that_were_changed_since_are_refused():
    head, hidden = head_and_hidden()
    hidden = hidden * 1.0
    logits = deferred(head, hidden)
    hidden.mul_(2)
    with pytest.raises(SequenceParallelError, match="changed in place before its logits were asked for"):
        logits.make()


def test_nothing_waits_for_the_garbage_collector():
    head, hidden = head_and_hidden()
    gc.disable()
    try:
        logits = deferred(head, hidden)
        known, total = (
            weakref.ref(logits.call),
            logits.flatten(0, 1).summed(lambda x, t: F.cross_entropy(x, t, reduction="none"), targets("tokens")),
        )
        del logits
        assert known() is None
        assert total.requires_grad
    finally:
        gc.enable()


def test_kept_weights_serve_after_those_in_use_are_gone():
    head, hidden = head_and_hidden()
    wanted = gradients(head(hidden).square().sum() + head(hidden).logsumexp(-1).sum(), head, hidden)
    logits = deferred(head, hidden)
    logits.call.keep()
    with torch.no_grad():
        head.weight.zero_()
    own = gradients(logits.logsumexp(-1).sum() + logits.square().sum(), head, hidden)
    assert max(map(max_error, own, wanted)) < 1e-12
