"""What the ranks of test_part_functions run: a head whose words are split over them, and the same head whole on each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_sp import comm, linear_cross_entropy
from lightning_sp.loss.output_head.deferred_logits import DeferredLogits
from lightning_sp.loss.output_head.head_call import HeadCall
from lightning_sp.loss.reduction import losses_of_tokens, sum_and_count
from lightning_sp.testing import max_error
from lightning_sp.weights.vocabulary_part import VocabularyPart, remember_part
from tests.instruments.live_storages import LiveStorages
from tests.loss.output_head import test_deferred_logits, test_written_logits
from tests.loss.output_head.test_chunked_head import CLASSES, OPTIONS, TARGETS, VOCAB, head_and_hidden, targets


def split(head: nn.Linear) -> nn.Linear:
    """Return this rank's part of a head."""
    size, rank = dist.get_world_size(), dist.get_rank()
    total = len(head.weight)
    words = total // size
    own = nn.Linear(head.in_features, total, bias=head.bias is not None, dtype=head.weight.dtype, device="meta")
    for name, each in head.named_parameters():
        mine = each.detach()[rank * words : (rank + 1) * words].clone()
        setattr(own, name, nn.Parameter(mine, requires_grad=each.requires_grad))
    part = VocabularyPart(first=rank * words, words=words, total=total, group=comm.world())
    remember_part(own, part)
    own.forward = lambda x: part.gathered(F.linear(part.copied(x), own.weight, own.bias))  # type: ignore[method-assign]
    return own


def deferred(head: nn.Linear, hidden: Tensor, chunk_tokens: int | str = 5) -> Tensor:
    made: Tensor = DeferredLogits.of(HeadCall(head, hidden, chunk_tokens), hidden)
    return made


def error(ask: Callable[[Tensor], Tensor], chunk_tokens: int | str = 5, **given: Any) -> float:
    """Return by how much the answers of a split head differ from those of a whole one: value, hidden states, weights, bias."""
    head, hidden = head_and_hidden(**given)
    own = split(head)
    expected = _with_gradients(ask(head(hidden)), head, hidden)
    found = _with_gradients(ask(deferred(own, hidden, chunk_tokens)), own, hidden)
    assert len(found) == len(expected) > 1
    words, first = len(own.weight), dist.get_rank() * len(own.weight)
    errors = [max_error(found[0], expected[0])]
    for a, b in zip(found[1:], expected[1:], strict=True):
        errors.append(max_error(a, b if a.shape == b.shape else b[first : first + words]))
    return max(errors)


def _with_gradients(answer: Tensor, head: nn.Linear, hidden: Tensor) -> list[Tensor]:
    upstream = torch.linspace(-1, 1, answer.numel(), dtype=torch.float64).view(answer.shape)
    wanted = [each for each in (hidden, *head.parameters()) if each.requires_grad]
    return [answer.detach(), *torch.autograd.grad((answer * upstream).sum(), wanted)]


def asked() -> dict[str, float]:
    """Ask all that is asked of deferred logits elsewhere."""
    questions = {**test_deferred_logits.MAKING, **test_deferred_logits.RECORDED}
    found = {name: error(ask) for name, ask in questions.items()}
    words = torch.linspace(0.5, 1.5, VOCAB, dtype=torch.float64)
    found["for each word"] = error(lambda x: (x * words + CLASSES).logsumexp(-1))
    found["likelihood"] = error(
        lambda x: F.nll_loss(x.log_softmax(-1).flatten(0, 1), targets("tokens"), reduction="none")
    )
    return found


def losses() -> dict[str, float]:
    """Compute cross entropies of every kind, as sums and of each token."""
    found = {}
    for kind in TARGETS:
        target = targets(kind)
        for number, options in enumerate(OPTIONS):
            for frozen in ((), ("weight",), ("hidden",)):
                for name, function in (
                    ("as it is", lambda x: x),
                    ("softcap", lambda x: 3 * torch.tanh(x.float().double() / 3) + CLASSES),
                ):
                    case = f"{kind} {number} {frozen} {name}"
                    given = dict(frozen=frozen, bias=bool(number % 2))
                    found[f"{case} sum"] = error(partial(_total, target, options, function), **given)
                    found[f"{case} each"] = error(partial(_each, target, options, function), **given)
    return found


def _total(target: Tensor, options: dict[str, Any], function: Any, logits: Tensor) -> Tensor:
    others = {name: value for name, value in options.items() if name != "weight"}
    flat = function(logits).flatten(0, 1)
    return sum_and_count(partial(F.cross_entropy, **others), flat, target, options.get("weight"), -100)[0]


def _each(target: Tensor, options: dict[str, Any], function: Any, logits: Tensor) -> Tensor:
    from lightning_sp.loss.output_head.part_functions import LossOfRows

    others = {name: value for name, value in options.items() if name != "weight"}
    loss = LossOfRows(partial(F.cross_entropy, **others), options.get("weight"), -100)
    return losses_of_tokens(loss, function(logits).flatten(0, 1), target, None)


def written() -> dict[str, float]:
    """Write to logits, or ask for their gradient."""
    steps = [each for each in test_written_logits.STEPS if "compiled" not in each.__name__]
    return {each.__name__: error(partial(_written, each)) for each in steps}


def _written(write: Any, logits: Tensor) -> Tensor:
    found: Tensor = write(logits, targets("tokens"))
    return found


def by_the_public_function(transform: Any = None) -> tuple[float, bool]:
    """Return the error of `linear_cross_entropy`, and whether a whole token's logits were made of it."""
    head, hidden = head_and_hidden()
    own, target = split(head), targets("tokens").view(hidden.shape[:2])
    logits = head(hidden) if transform is None else transform(head(hidden))
    expected = _with_gradients(F.cross_entropy(logits.flatten(0, 1), target.flatten()), head, hidden)
    gathers: list[int] = []
    gather, comm.tensor_parallel.gather = comm.tensor_parallel.gather, lambda *a: gathers.append(1) or gather(*a)
    try:
        # The mean over the world's tokens, which are the same ones here.
        loss = linear_cross_entropy(hidden, own, target, transform=transform, chunk_tokens=4)
        found = _with_gradients(loss, own, hidden)
    finally:
        comm.tensor_parallel.gather = gather
    words, first = len(own.weight), dist.get_rank() * len(own.weight)
    errors = [
        max_error(a, b if a.shape == b.shape else b[first : first + words])
        for a, b in zip(found, expected, strict=True)
    ]
    return max(errors), bool(gathers)


def most_bytes(tokens: int, width: int, words: int, options: dict[str, Any]) -> dict[str, int]:
    """Return the most bytes that a loss and its backward add, of a split and of a whole head, float32."""
    torch.manual_seed(1)
    found = {}
    head, hidden = nn.Linear(width, words, bias=False), torch.randn(1, tokens, width, requires_grad=True)
    target = torch.randint(0, words, (tokens,))
    for name, each in (("whole", head), ("split", split(head))):
        with LiveStorages([*each.parameters(), hidden, target]) as live:
            loss = _total(target, options, lambda x: x, deferred(each, hidden, 32))
            loss.backward()
        found[name] = live.peak_bytes
    return found
