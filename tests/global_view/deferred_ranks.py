"""Losses of an output head whose logits wait, on shards in the global view, and the same on one device with logits that are made."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_sp import comm, linear_cross_entropy, sharded_cross_entropy
from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.tensors.sequence_tensor import whole_of
from lightning_sp.layout import pad, shard
from lightning_sp.loss.interception import CrossEntropyInterception
from lightning_sp.loss.output_head.deferred_heads import DeferredHeads
from lightning_sp.mesh import SequenceMesh, build_device_mesh
from tests.global_view.cases.rule_cases import E
from tests.global_view.rule_ranks import batch_of, distance, inputs
from tests.loss.most_tokens import MostTokens

# Of a head of its own, so that a vocabulary is known by its size.
WORDS, CHUNK = 37, 3
Case = Callable[[Any, Tensor, Tensor], Any]


class Headed(nn.Module):
    """A model's head alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(E, WORDS, dtype=torch.float64)
        generator = torch.Generator().manual_seed(11)
        for each in self.parameters():
            each.data = torch.randn(each.shape, generator=generator, dtype=torch.float64)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def hugging_face(logits: Tensor, labels: Tensor) -> Tensor:
    """As transformers' ForCausalLMLoss, in float64."""
    logits = logits.double()
    labels = F.pad(labels, (0, 1), value=-100)
    shifted = labels[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, WORDS), shifted.view(-1).to(logits.device), ignore_index=-100)


def shifted_inside(logits: Tensor, labels: Tensor) -> Tensor:
    shift_logits, shift_labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return F.cross_entropy(shift_logits.view(-1, WORDS), shift_labels.view(-1))


def masked_mean(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none", label_smoothing=0.1)
    return (losses * mask[:, 1:]).sum() / mask[:, 1:].sum()


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, torch.linspace(0.5, 2, WORDS, dtype=logits.dtype))


def gathered(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    logps = logits[:, :-1].log_softmax(-1).gather(2, labels[:, 1:].unsqueeze(2)).squeeze(2)
    return (logps * mask[:, 1:]).sum(-1).square().mean()


def written_before(logits: Tensor, labels: Tensor) -> Tensor:
    logits.mul_(0.5)
    return F.cross_entropy(logits[:, 1:].flatten(0, 1), labels[:, :-1].flatten())


def word_written_before(logits: Tensor, labels: Tensor) -> Tensor:
    logits[..., 0] = -5.0
    return F.cross_entropy(logits.flip(1).flatten(0, 1), labels.flatten())


def written_copy(logits: Tensor, labels: Tensor) -> Tensor:
    part = logits[:, 1:].clone()
    part[..., 0] = -5.0
    return F.cross_entropy(part.flatten(0, 1), labels[:, :-1].flatten()) + shifted_inside(logits, labels)


def soft_labels(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), (F.one_hot(labels, WORDS) * 0.7 + 0.3 / WORDS).flatten(0, 1))


def each_row(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return sum((logits[i].log_softmax(-1)[:, 3] * mask[i]).sum() for i in range(len(logits)))  # type: ignore[return-value]


# What makes no more than a chunk of them.
WAITING: dict[str, Case] = {
    "shifted inside": lambda x, ids, mask: shifted_inside(x, ids),
    "hugging face": lambda x, ids, mask: hugging_face(x, ids),
    "all positions": lambda x, ids, mask: F.cross_entropy(x.view(-1, WORDS), ids.roll(-1, 1).view(-1)),
    "softcap": lambda x, ids, mask: shifted_inside(3 * torch.tanh(x / 3), ids),
    "softcap of a part": lambda x, ids, mask: hugging_face(3 * torch.tanh(x[:, 2:] / 3), ids[:, 2:]),
    "a mean by hand": masked_mean,
    "a sum": lambda x, ids, mask: F.cross_entropy(x[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"),
    "weights of classes": lambda x, ids, mask: weighted(x, ids),
    "ignored": lambda x, ids, mask: F.cross_entropy(x.flatten(0, 1), ids.masked_fill(mask == 0, 4).flatten(), ignore_index=4),
    "two tokens ahead": lambda x, ids, mask: sum(F.cross_entropy(x[:, :-k].reshape(-1, WORDS), ids[:, k:].reshape(-1)) for k in (1, 2)),
    "log probabilities": gathered,
    "squared normalizers": lambda x, ids, mask: x.logsumexp(-1).square().mean() + shifted_inside(x, ids),
    "nll": lambda x, ids, mask: F.nll_loss(x.log_softmax(-1)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()),
    "most likely": lambda x, ids, mask: shifted_inside(x, ids) * (1 + (x.argmax(-1) == ids).sum()),
    "chosen tokens": lambda x, ids, mask: F.cross_entropy(x[mask.bool()], ids[mask.bool()]),
    "turned around": lambda x, ids, mask: F.cross_entropy(x.flip(1).flatten(0, 1), ids.flatten()),
    "without a graph": lambda x, ids, mask: shifted_inside(x.detach(), ids) * x.logsumexp(-1)[:, 0].sum(),
}  # fmt: skip
# What reads the logits.
MADE: dict[str, Case] = {
    "soft labels": lambda x, ids, mask: soft_labels(x, ids),
    "padded": lambda x, ids, mask: F.pad(x, (0, 0, 0, 2), value=0.25).square().sum(),
    "the last token": lambda x, ids, mask: x[:, -1].softmax(-1).square().sum() + shifted_inside(x, ids),
    "a word of chosen tokens": lambda x, ids, mask: (
        x[torch.tensor([0, 1]), torch.tensor([2, 5]), torch.tensor([3, 1])].square().sum()
    ),
    "spread": lambda x, ids, mask: x.std() + shifted_inside(x, ids),
    "written before": lambda x, ids, mask: written_before(x, ids),
    "a word written before": lambda x, ids, mask: word_written_before(x, ids),
    "a copy that is written to": lambda x, ids, mask: written_copy(x, ids),
    "each row": each_row,
    "of the whole": lambda x, ids, mask: whole_of(x).cumsum(1).square().mean() + shifted_inside(x, ids),
    "no graph of a part": lambda x, ids, mask: x.detach()[:, 1:].square().mean() * x[:, 1:].logsumexp(-1).mean(),
    "beside a whole tensor": lambda x, ids, mask: (x * torch.arange(x.shape[1])[:, None]).square().mean(),
}


# Of hidden states and a head: by a function of this package, and as one device writes it.
PUBLIC: dict[str, tuple[Any, Any]] = {
    "chunks by hand": (
        lambda x, head, ids: linear_cross_entropy(x[:, :-1], head, ids[:, 1:], transform=torch.tanh, chunk_tokens=CHUNK),
        lambda x, head, ids: F.cross_entropy(torch.tanh(head(x[:, :-1])).flatten(0, 1), ids[:, 1:].flatten()),
    ),
    "a sum over ranks by hand": (
        lambda x, head, ids: sharded_cross_entropy(head(x), ids, reduction="sum"),
        lambda x, head, ids: F.cross_entropy(head(x).flatten(0, 1), ids.flatten(), reduction="sum"),
    ),
}  # fmt: skip


def losses(names: list[str], length: int, ulysses: int, ring: int) -> list[Any]:
    """Return for each case the largest errors of loss and gradients and how many tokens' logits were made, or what was refused."""
    warnings.filterwarnings("ignore", "torch flash")
    base = build_device_mesh("cpu", data_parallel_size=1, sequence_parallel_size=ulysses * ring)
    mesh = SequenceMesh.build(base, ring_size=ring, ulysses_size=ulysses)
    return [_errors(name, length, mesh) for name in names]


def _loss(name: str, model: Headed, x: Any, ids: Tensor, mask: Tensor, *, alone: bool) -> Any:
    if name in PUBLIC:
        return PUBLIC[name][alone](x, model.head, ids)
    return (WAITING | MADE)[name](model(x), ids, mask)


def _errors(name: str, length: int, mesh: SequenceMesh) -> Any:
    (x, ids, mask), leaf = batch_of(length, mesh)
    context: SequenceContext = x.placement.storage.attend.context  # type: ignore[attr-defined]
    model, most = Headed(), MostTokens(WORDS, E)
    try:
        with CrossEntropyInterception(context, lambda *_: None), DeferredHeads(context, model, CHUNK):
            with most:
                loss = _loss(name, model, x * 1.5, ids, mask, alone=False)
            (loss / mesh.layout.size).backward()
    except SequenceParallelError as error:
        return str(error)
    alone = Headed()
    own, own_ids, own_mask = inputs(length)
    wanted = _loss(name, alone, own.requires_grad_() * 1.5, own_ids, own_mask, alone=True)
    wanted.backward()
    padded = mesh.layout.padded_length(length)
    mine = shard(pad(own.grad, padded, dim=1, value=0), mesh.layout, mesh.sequence_rank, dim=1)
    of_head = [None if each.grad is None else comm.reduce_sum(each.grad, mesh.sequence_group) for each in model.parameters()]  # fmt: skip
    found = [loss.detach(), leaf.grad, *of_head]
    return {
        "error": distance(found, [wanted.detach(), mine, *(each.grad for each in alone.parameters())]),
        "tokens": most.tokens,
    }
