"""LightningModules as users write them, for one device: attention, positions, masks and losses by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.global_view.models.layers import LAYERS, Layered, smoothed
from tests.instruments.record import Record

V, E, H, BLOCK = 23, 16, 4, 64


class CausalSelfAttention(nn.Module):
    """As in nanoGPT, without flash attention."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.0), nn.Dropout(0.0)
        self.register_buffer("bias", torch.tril(torch.ones(BLOCK, BLOCK)).view(1, 1, BLOCK, BLOCK))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(E, dim=2)
        k = k.view(B, T, H, C // H).transpose(1, 2)
        q = q.view(B, T, H, C // H).transpose(1, 2)
        v = v.view(B, T, H, C // H).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(E), nn.LayerNorm(E), CausalSelfAttention()
        self.mlp = nn.Sequential(nn.Linear(E, 4 * E), nn.GELU(), nn.Linear(4 * E, E))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, E), nn.Embedding(BLOCK, E)
        self.h = nn.ModuleList([Block(), Block()])
        self.ln_f, self.lm_head = nn.LayerNorm(E), nn.Linear(E, V, bias=False)
        self.wte.weight = self.lm_head.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def hidden(self, idx: Tensor) -> Tensor:
        _, t = idx.size()
        assert t <= BLOCK
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        return self.ln_f(x)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.lm_head(self.hidden(idx))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)


class Module(pl.LightningModule):
    def __init__(self, loss: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.losses = NanoGPT(), Record()
        self.score = nn.Linear(E, 3)
        self._loss = LOSSES[loss]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(self, batch)
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def input_and_target(module: Any, batch: Any) -> Tensor:
    """The inputs are all tokens but the last."""
    ids = batch["input_ids"]
    return module.model(ids[:, :-1], ids[:, 1:])[1]


def shifted_logits(module: Any, batch: Any) -> Tensor:
    """Hugging Face's old loss."""
    logits = module.model(batch["input_ids"])[0]
    shift_logits, shift_labels = logits[..., :-1, :].contiguous(), batch["input_ids"][..., 1:].contiguous()
    return F.cross_entropy(shift_logits.view(-1, V), shift_labels.view(-1))


def masked_mean(module: Any, batch: Any) -> Tensor:
    """A mean over tokens written by hand."""
    logits = module.model(batch["input_ids"])[0]
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
    mask = batch["attention_mask"][:, 1:].to(losses.dtype)
    return (losses * mask).sum() / mask.sum()


def z_loss(module: Any, batch: Any) -> Tensor:
    logits, loss = module.model(batch["input_ids"], batch["input_ids"].roll(-1, 1))
    return loss + 1e-2 * torch.logsumexp(logits, dim=-1).pow(2).mean()


def mean_pooled(module: Any, batch: Any) -> Tensor:
    x, mask = module.model.hidden(batch["input_ids"]), batch["attention_mask"]
    pooled = (x * mask.unsqueeze(-1)).sum(1) / mask.sum(-1, keepdim=True).clamp(min=1)
    return F.cross_entropy(module.score(pooled), batch["classes"])


def last_pooled(module: Any, batch: Any) -> Tensor:
    x, mask = module.model.hidden(batch["input_ids"]), batch["attention_mask"]
    last = x[torch.arange(x.shape[0]), mask.sum(-1) - 1]
    return F.cross_entropy(module.score(last), batch["classes"])


def first_pooled(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module.score(module.model.hidden(batch["input_ids"])[:, 0]), batch["classes"])


def max_pooled(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module.score(module.model.hidden(batch["input_ids"]).max(dim=1).values), batch["classes"])


def attention_pooled(module: Any, batch: Any) -> Tensor:
    x = module.model.hidden(batch["input_ids"])
    weights = x.mean(-1).masked_fill(batch["attention_mask"] == 0, float("-inf")).softmax(dim=1)
    return F.cross_entropy(module.score(torch.einsum("bs,bse->be", weights, x)), batch["classes"])


def sequence_logps(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    logps = torch.gather(logits[:, :-1].log_softmax(-1), 2, ids[:, 1:].unsqueeze(2)).squeeze(2)
    return (logps * mask[:, 1:]).sum(-1)


def dpo(module: Any, batch: Any) -> Tensor:
    """Of two rows the first is chosen; the reference are the unchanged logits of position-free embeddings."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    policy = sequence_logps(module.model(ids)[0], ids, mask)
    with torch.no_grad():
        reference = sequence_logps(module.model(ids)[0] * 0.5, ids, mask)
    ratios = policy - reference
    return -F.logsigmoid(0.1 * (ratios[0::2] - ratios[1::2])).mean()


def ipo(module: Any, batch: Any) -> Tensor:
    ids, mask = batch["input_ids"], batch["attention_mask"]
    average = sequence_logps(module.model(ids)[0], ids, mask) / mask[:, 1:].sum(-1)
    return (average[0::2] - average[1::2] - 1 / 0.2).square().mean()


def grpo(module: Any, batch: Any) -> Tensor:
    """Clipped ratios of tokens, weighed by an advantage of each row."""
    ids, mask = batch["input_ids"], batch["attention_mask"][:, 1:]
    logps = torch.gather(module.model(ids)[0][:, :-1].log_softmax(-1), 2, ids[:, 1:].unsqueeze(2)).squeeze(2)
    ratio = torch.exp(logps - logps.detach() * 1.01)
    advantage = torch.linspace(-1, 1, ids.shape[0], dtype=logps.dtype).unsqueeze(1)
    per_token = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return ((per_token * mask).sum(1) / mask.sum(1)).mean()


def distillation(module: Any, batch: Any) -> Tensor:
    student = module.model(batch["input_ids"])[0]
    with torch.no_grad():
        teacher = module.model(batch["input_ids"])[0].flip(-1)
    kl = F.kl_div(F.log_softmax(student / 2, dim=-1), F.softmax(teacher / 2, dim=-1), reduction="none").sum(-1)
    mask = batch["attention_mask"]
    return (kl * mask).sum() / mask.sum()


def regression(module: Any, batch: Any) -> Tensor:
    return (
        F.mse_loss(
            module.model.hidden(batch["input_ids"]).square().mean(-1), batch["input_ids"].to(torch.float64).cos()
        )
        + module.model.hidden(batch["input_ids"])[..., 0].pow(2).mean()
    )


def contrastive(module: Any, batch: Any) -> Tensor:
    x = F.normalize(module.model.hidden(batch["input_ids"]).mean(1), dim=-1)
    a, b = x[0::2], x[1::2]
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(a.shape[0]))


def multi_token(module: Any, batch: Any) -> Tensor:
    """Two tokens are predicted from each."""
    ids = batch["input_ids"]
    logits = module.model(ids)[0]
    return sum(F.cross_entropy(logits[:, :-k].reshape(-1, V), ids[:, k:].reshape(-1)) / k for k in (1, 2))


def smoothness(module: Any, batch: Any) -> Tensor:
    x, loss = module.model.hidden(batch["input_ids"]), input_and_target(module, batch)
    return loss + (x[:, 1:] - x[:, :-1]).pow(2).mean()


def chosen_sums(module: Any, batch: Any) -> Tensor:
    """Sums over tokens that a mask or numbers choose: as many on a rank as rows, or as it has tokens without one of each row."""
    ids = batch["input_ids"]
    logits, count = module.model(ids)[0], ids.shape[0] * 14
    first = torch.arange(ids.numel(), device=ids.device).view_as(ids) < 2 * count
    some = F.cross_entropy(logits[first], ids[first], reduction="sum") / (2 * count)
    two = F.cross_entropy(logits[:, [3, 5]].flatten(0, 1), ids[:, [4, 6]].flatten(), reduction="sum")
    each = F.cross_entropy(logits[:, 7], ids[:, 8], reduction="sum") + F.cross_entropy(logits[0, 2:6], ids[0, 3:7])
    return some + (two + each) / ids.shape[0]


def adversarial(module: Any, batch: Any) -> Tensor:
    """A step along the gradient of the embeddings, as FGM takes it; and a residual that is added in place."""
    ids, model = batch["input_ids"], module.model

    def loss_of(x: Tensor) -> Tensor:
        for block in model.h:
            x = block(x)
        x[:, 1:] += 0.1 * model.wte(ids[:, :-1])
        return F.cross_entropy(module.score(model.ln_f(x).mean(1)), batch["classes"])

    x = model.wte(ids) + model.wpe(torch.arange(ids.shape[1], device=ids.device))
    clean = loss_of(x)
    (gradient,) = torch.autograd.grad(clean, x, retain_graph=True)
    return clean + loss_of(x + 0.1 * gradient / gradient.norm())


def adversarial_token(module: Any, batch: Any) -> Tensor:
    """A step along the gradient of one token that was taken."""
    first = module.model.hidden(batch["input_ids"])[:, 0]
    clean = F.cross_entropy(module.score(first), batch["classes"])
    (gradient,) = torch.autograd.grad(clean, first, retain_graph=True)
    return clean + F.cross_entropy(module.score(first + 0.1 * gradient / gradient.norm()), batch["classes"])


LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    each.__name__: each
    for each in (
        input_and_target, shifted_logits, masked_mean, z_loss, mean_pooled, last_pooled, first_pooled, max_pooled, attention_pooled,
        dpo, ipo, grpo, distillation, regression, contrastive, multi_token, smoothness, chosen_sums, adversarial, adversarial_token,
    )
}  # fmt: skip


class LayeredModule(pl.LightningModule):
    """A model of one kind of layer."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.losses = Layered(layer), Record()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = smoothed(self.model(batch["input_ids"]), batch)
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def module_of(name: str) -> Any:
    """Return the module of a layer or a loss."""
    return LayeredModule(name) if name in LAYERS else Module(name)


def rows(length: int, num_rows: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for i in range(num_rows):
        mask = torch.ones(length, dtype=torch.int64)
        mask[length - i % 3 :] = 0
        ids = torch.randint(V, (length,), generator=generator)
        made.append({"input_ids": ids, "attention_mask": mask, "classes": torch.tensor(i % 3)})
    return made
