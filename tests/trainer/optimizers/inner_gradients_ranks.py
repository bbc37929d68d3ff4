"""Gradients that a step asks for by itself, and modules that it calls with other weights: what each rank runs in test_inner_gradients.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from lightning_sp.reductions import batch_sum
from tests.trainer.lightning_ranks import trainer_of
from tests.trainer.tiny import Plain, TokenDataset, _full, tiny_gpt


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def of_states(self: Any, states: Tensor) -> Tensor:
    return self.head(self.body(states))


def of_batch(self: Any, batch: Any) -> Tensor:
    return loss_of(self.head(self.body(self.embed(batch["input_ids"]))), batch["shift_labels"])


def freelb(self: Any, batch: Any) -> Tensor:
    """Adversarial training: a disturbance of the embeddings that grows along their gradient, over one graph of the embeddings."""
    states, total = self.embed(batch["input_ids"]), 0
    delta = torch.zeros_like(states).requires_grad_()
    for _ in range(2):
        loss = loss_of(of_states(self, states + delta), batch["shift_labels"])
        (gradient,) = torch.autograd.grad(loss, delta, retain_graph=True)
        self.log("norm", gradient.norm())
        delta = (delta + 0.1 * gradient / (gradient.norm(dim=-1, keepdim=True) + 1e-8)).detach().requires_grad_()
        total = total + loss / 2
    return total


def fast_gradient(self: Any, batch: Any) -> Tensor:
    """Of the embeddings themselves, whose scale matters, and of a whole vector that is added to all tokens."""
    states, shift = self.embed(batch["input_ids"]), torch.zeros(32, dtype=torch.float64, requires_grad=True)
    inner = loss_of(of_states(self, states.detach().requires_grad_() + shift), batch["shift_labels"])
    (of_shift,) = torch.autograd.grad(inner, shift)
    again = states.detach().requires_grad_()
    (of_states_,) = torch.autograd.grad(loss_of(of_states(self, again), batch["shift_labels"]), again)
    return loss_of(of_states(self, states + 3 * of_states_ + of_shift), batch["shift_labels"])


def virtual(self: Any, batch: Any) -> Tensor:
    """A gradient of what is not summed: outputs of tokens, each with a seed."""
    states = self.embed(batch["input_ids"]).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(self.body(states), states, torch.ones_like(states))
    return of_batch(self, batch) + 0.1 * (gradient * self.embed(batch["input_ids"])).mean()


def of_weights(self: Any, batch: Any) -> Tensor:
    """GradNorm: losses weighed by the norms of their gradients; a weight that no loss uses."""
    logits = self.model(batch["input_ids"], torch.arange(batch["input_ids"].shape[1])[None])
    losses = [loss_of(logits, batch["shift_labels"]), loss_of(logits.tanh(), batch["input_ids"])]
    asked = [next(p for p in self.model.layers.parameters() if p.dim() == 2), self.model.unused.weight]
    found = [torch.autograd.grad(each, asked, retain_graph=True, allow_unused=True) for each in losses]
    assert all(of_unused is None for _, of_unused in found)
    norms = torch.stack([each.norm() for each, _ in found])
    self.log("ratio", norms[0] / norms[1])
    return sum(each * weight for each, weight in zip(losses, norms.mean() / norms, strict=True))


def of_schedule(self: Any, batch: Any) -> Tensor:
    """Weights of rows by the slope of a schedule of noise, by torch.func: nothing of it is of the sequence."""
    times = (batch["input_ids"][:, 0] + 1).double() / 64
    slopes, values = torch.vmap(torch.func.grad_and_value(lambda time: 1 - time.square()))(times)
    logits = self.head(self.body(self.embed(batch["input_ids"])))
    each = F.cross_entropy(logits.transpose(1, 2), batch["shift_labels"], reduction="none").mean(1)
    return (each * slopes / (values - 1)).mean()


def of_states_twice(self: Any, batch: Any) -> Tensor:
    """GradNorm by hidden states: two heads, one of them the module's own; each is asked before the step's backward goes through it."""
    x = self.table(batch["input_ids"]).unflatten(-1, (4, 8)).transpose(1, 2)
    states = F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).flatten(2)
    losses = [loss_of(self.model.head(states), batch["shift_labels"]), loss_of(self.head(states), batch["input_ids"])]
    found = [torch.autograd.grad(each, states, retain_graph=True)[0].detach() for each in losses]
    seen = [batch_sum(each.square().sum(-1)).sqrt() for each in found]
    return sum(each * weight for each, weight in zip(losses, seen, strict=True))


def inner_step(self: Any, batch: Any) -> Tensor:
    """A head that is moved by half of the rows, and learns by the others through that: a second derivative."""
    half = len(batch["input_ids"]) // 2
    states = self.body(self.embed(batch["input_ids"]))
    inner = loss_of(self.head(states[:half]), batch["shift_labels"][:half])
    of_weight, of_bias = torch.autograd.grad(inner, [self.head.weight, self.head.bias], create_graph=True)
    moved = F.linear(states[half:], self.head.weight - of_weight, self.head.bias - of_bias)
    return loss_of(moved, batch["shift_labels"][half:])


def first_rows(self: Any, batch: Any) -> Tensor:
    """Rows by number: on two of them there is no loss."""
    logits = self.head(self.body(self.embed(batch["input_ids"])))
    return loss_of(logits[2:], batch["shift_labels"][2:])


def first_order(self: Any, batch: Any) -> Tensor:
    """MAML's first order: the whole model, moved by half of the rows."""
    half, ids, targets = len(batch["input_ids"]) // 2, batch["input_ids"], batch["shift_labels"]
    own = dict(self.model.named_parameters())
    loss = loss_of(self.model(ids[:half], torch.arange(ids.shape[1])[None]), targets[:half])
    found = torch.autograd.grad(loss, list(own.values()), allow_unused=True)
    moved = {name: p if g is None else p - 0.5 * g for (name, p), g in zip(own.items(), found, strict=True)}
    return loss_of(functional_call(self.model, moved, (ids[half:], batch["position_ids"][half:])), targets[half:])


def teacher(self: Any, batch: Any) -> Tensor:
    """A teacher of other weights in the same module."""
    args = (batch["input_ids"], batch["position_ids"])
    weights = {name: p.detach() * 0.7 for name, p in self.model.named_parameters()}
    wanted = functional_call(self.model, weights, args).detach()
    logits = self.model(*args)
    return loss_of(logits, batch["shift_labels"]) + F.mse_loss(logits, wanted)


def learned(self: Any, batch: Any) -> Tensor:
    """Some weights made of others, which learn; those that are not given are the module's own."""
    weights = {n: p + self.head.bias[:1] * p.tanh() for n, p in self.model.named_parameters() if "layers" in n}
    return loss_of(
        functional_call(self.model, weights, (batch["input_ids"], batch["position_ids"])), batch["shift_labels"]
    )


def penalty(self: Any, batch: Any) -> Tensor:
    """A gradient penalty: the slope of a critic, a unit of FSDP's own, by what it sees; of neighbours, means, single tokens and spectra."""
    states = self.embed(batch["input_ids"])
    verdict = self.critic(states.mT).tanh().mean()
    seen = states.detach().requires_grad_()
    judged = self.critic(seen.mT)
    values = judged.mean(-1).square() + judged[..., 3].tanh() + torch.fft.rfft(judged, dim=-1)[..., 1].abs().tanh()
    (gradient,) = torch.autograd.grad(values.sum(), seen, create_graph=True)
    slopes = gradient.flatten(1).norm(dim=1)
    self.log("slope", slopes.mean())
    return of_batch(self, batch) + 0.1 * (slopes - 1).square().mean() + 0.1 * verdict


STEPS = {f.__name__: f for f in (
    penalty, freelb, fast_gradient, virtual, of_weights, of_states_twice, inner_step, first_rows, first_order, teacher, learned,
    of_schedule,
)}  # fmt: skip


class Asking(Plain):
    """A language model whose step asks for gradients, or calls its model with other weights."""

    def __init__(self, step: str) -> None:
        super().__init__(tiny_gpt)
        self.step = STEPS[step]
        torch.manual_seed(3)
        self.model = tiny_gpt()
        self.model.unused = nn.Linear(5, 3)
        self.table, self.head, self.other = nn.Embedding(61, 32), nn.Linear(32, 61), nn.Linear(32, 61)
        self.critic = nn.Sequential(nn.Conv1d(32, 8, 3, padding=1), nn.Tanh(), nn.Conv1d(8, 1, 2))
        for p in self.parameters():
            p.data += 0.1 * torch.randn_like(p)

    def embed(self, ids: Tensor) -> Tensor:
        return self.table(ids)

    def body(self, states: Tensor) -> Tensor:
        """What looks along the sequence by the numbers of its tokens, after an attention written out."""
        seen = torch.ones(states.shape[1], states.shape[1], dtype=torch.bool).tril()
        states = states + 0.1 * torch.arange(states.shape[1], dtype=states.dtype)[:, None].sin()
        scores = (states @ states.mT / 6).masked_fill(~seen, -torch.inf)
        return (states + scores.softmax(-1) @ states).tanh()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.step(self, batch)
        self.log("train_loss", loss)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ByHand(Asking):
    """Manual optimization without a backward: gradients of two losses, put together and given to the optimizer (PCGrad)."""

    def __init__(self, step: str = "teacher") -> None:
        super().__init__(step)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        logits = self.model(
            batch["input_ids"], torch.arange(batch["input_ids"].shape[1]).expand(len(batch["input_ids"]), -1)
        )
        losses = [loss_of(logits, batch["shift_labels"]), loss_of(logits, batch["input_ids"])]
        weights = [p for p in self.model.parameters() if p.shape[0] != 3]
        a, b = ([*torch.autograd.grad(each, weights, retain_graph=True)] for each in losses)
        agreement = sum((x * y).sum() for x, y in zip(a, b, strict=True))
        along = float(agreement / sum((y * y).sum() for y in b))
        for weight, x, y in zip(weights, a, b, strict=True):
            weight.grad = x - along * y + y
        optimizer.step()
        self.log("agreement", agreement)
        self.losses.append(float(losses[0].detach()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)


class Weighed(ByHand):
    """GradNorm by manual optimization: losses have weights of the module's own, whose gradient is assigned behind the backward of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.weighed = nn.Parameter(torch.ones(2))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, of_weights = self.optimizers()
        logits = self.model(
            batch["input_ids"], torch.arange(batch["input_ids"].shape[1]).expand(len(batch["input_ids"]), -1)
        )
        losses = torch.stack([loss_of(logits, batch["shift_labels"]), loss_of(logits, batch["input_ids"])])
        balance = (self.weighed * losses.detach()).var()
        (asked,) = torch.autograd.grad(balance, self.weighed)
        optimizer.zero_grad()
        of_weights.zero_grad()
        self.manual_backward((self.weighed * losses).sum())
        self.weighed.grad = asked
        optimizer.step()
        of_weights.step()
        self.losses.append(float(losses[0].detach()))

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers(), torch.optim.Adam([self.weighed], lr=0.05)


def runs(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [run(**case) for case in cases]


def run(step: str, strategy: dict[str, Any] | None, world: int, micro: int = 4, **options: Any) -> dict[str, Any]:
    """Fit under plain Lightning (None) or ours; losses, gradients and weights, or the refusal."""
    by_hand = {"by_hand": ByHand, "weighed_by_hand": Weighed}
    module: Any = by_hand[step]() if step in by_hand else Asking(step)
    trainer = trainer_of(strategy, world, **options)
    data = TokenDataset(12)
    rows = [{**data[i], "shift_labels": data.tokens[i, 1:]} for i in range(12)]
    try:
        trainer.fit(module, DataLoader(rows, batch_size=micro))  # type: ignore[arg-type]
    except SequenceParallelError as error:
        return {"error": str(error)}
    weights = {n: _full(p.detach()).clone() for n, p in module.named_parameters()}
    logged = {n: float(v) for n, v in trainer.callback_metrics.items()}
    return {"error": "", "losses": module.losses, "weights": weights, "grads": module.raw_grads, "logged": logged}
