"""Models with one planted fault each, of those that break a sequence which is split; what each rank runs in test_faulty_models.py."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.trainer.tiny import VOCAB, Plain, TokenDataset, quiet_trainer

LENGTH, WIDTH = 96, 16
IMAGES = torch.arange(8 * WIDTH).square().sin().view(8, WIDTH)


class Module(nn.Module):
    """A part that is a function, perhaps with a layer of its own."""

    def __init__(self, function: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.layers)


class HalvesGradient(torch.autograd.Function):
    """A backward that depends on the number of tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.shape[1] ** 0.5


def by_hand(x: Tensor) -> Tensor:
    scores = x @ x.mT / WIDTH**0.5
    return scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf).softmax(-1) @ x


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 8)).transpose(1, 2) if x.dim() == 3 else x.transpose(1, 2).flatten(2)


def hooked(x: Tensor) -> Tensor:
    x = x * 1.0
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * gradient.shape[1] / 64)
    return x


def placed(x: Tensor) -> Tensor:
    images = IMAGES.to(x.dtype)
    chosen = torch.zeros(x.shape[:2], dtype=torch.bool)
    chosen[:, ::16] = True
    return x.masked_scatter(chosen[..., None], images)


# name -> the part that is added to the hidden states, (B, S, E) -> (B, S, E) or what broadcasts to it
PARTS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: Module(lambda x, conv: conv(x.mT).mT, nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "causal convolution": lambda: Module(lambda x, conv: conv(F.pad(x.mT, (2, 0))).mT, nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)),
    "gru": lambda: Module(lambda x, gru: gru(x)[0], nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "lstm": lambda: Module(lambda x, lstm: lstm(x)[0], nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "batch norm": lambda: Module(lambda x, norm: norm(x.mT).mT, nn.BatchNorm1d(WIDTH)),
    "instance norm": lambda: Module(lambda x, norm: norm(x.mT).mT, nn.InstanceNorm1d(WIDTH)),
    "layer norm over tokens": lambda: Module(lambda x: F.layer_norm(x.mT, (x.shape[1],)).mT),
    "normalised over tokens": lambda: Module(lambda x: F.normalize(x, dim=1)),
    "deviation over tokens": lambda: Module(lambda x: x / x.std(1, keepdim=True)),
    "mean": lambda: Module(lambda x: x.mean(1, keepdim=True)),
    "maximum": lambda: Module(lambda x: x.amax(1, keepdim=True)),
    "pooling": lambda: Module(lambda x: F.avg_pool1d(x.mT, 3, 1, 1).mT),
    "attention by hand": lambda: Module(by_hand),
    "linear attention": lambda: Module(lambda x: torch.einsum("bse,btf->bef", x, x).mean(2)[:, None]),
    "softmax over tokens": lambda: Module(lambda x: x.softmax(1)),
    "cumulative sum": lambda: Module(lambda x: x.cumsum(1) / 8),
    "roll": lambda: Module(lambda x: x.roll(1, 1)),
    "token shift": lambda: Module(lambda x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)),
    "padded shift": lambda: Module(lambda x: F.pad(x, (0, 0, 1, -1))),
    "first token": lambda: Module(lambda x: x[:, :1]),
    "last token": lambda: Module(lambda x: x[:, -1:]),
    "counted positions": lambda: Module(lambda x, table: table(torch.arange(x.shape[1])), nn.Embedding(128, WIDTH)),
    "table of positions": lambda: Module(lambda x, table: table.weight[: x.shape[1]], nn.Linear(WIDTH, 150)),
    "length": lambda: Module(lambda x: x / x.shape[1] ** 0.5),
    "sort": lambda: Module(lambda x: x.sort(1)[0]),
    "best tokens": lambda: Module(lambda x: x.topk(4, 1)[0].sum(1, keepdim=True)),
    "fourier": lambda: Module(lambda x: torch.fft.fft(x, dim=1).real / 8),
    "flip": lambda: Module(lambda x: x.flip(1)),
    "router": lambda: Module(lambda x: x * torch.bincount(x.detach().argmax(-1).flatten(), minlength=WIDTH)),
    "placed": lambda: Module(placed),
    "mask": lambda: Module(lambda x: heads(F.scaled_dot_product_attention(*(heads(x),) * 3, is_causal=x.shape[1] > 40))),
    "hook": lambda: Module(hooked),
    "backward": lambda: Module(HalvesGradient.apply),
    "noise": lambda: Module(lambda x: 0.1 * torch.randn_like(x)),
    "dropout by name": lambda: Module(lambda x: torch.dropout(x, 0.5, True)),
    "fine": lambda: Module(lambda x: x.tanh()),
}  # fmt: skip


class Decoder(nn.Module):
    """One layer of attention, a part, and a head."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(128, WIDTH)
        self.qkv, self.part = nn.Linear(WIDTH, 3 * WIDTH), part
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions(positions)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.part(x)
        return self.head(self.norm(x))


class Step(Plain):
    """A training step with a fault of choice."""

    def __init__(self, fault: str) -> None:
        super().__init__(None)
        torch.manual_seed(3)
        self.fault = fault
        self.model = Decoder(PARTS.get(fault, PARTS["fine"])())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels, positions = batch["input_ids"], batch["shift_labels"], batch["position_ids"]
        if self.fault == "rolled labels":
            labels = ids.roll(-1, 1)
        if self.fault == "padded labels":
            labels = F.pad(ids[:, 1:], (0, 1), value=-100)
        if self.fault == "positions in the step":
            positions = torch.arange(ids.shape[1]).expand_as(ids)
        if self.fault == "shifted positions":
            positions = positions - positions[:, :1]
        logits = self.model(ids, positions)
        if self.fault == "divided by tokens":
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / ids.numel()
        if self.fault == "divergence":
            return F.kl_div(logits.log_softmax(-1), wanted(logits), reduction="batchmean")
        if self.fault == "divergence of tokens":
            flat = logits.flatten(0, 1)
            return F.kl_div(flat.log_softmax(-1), wanted(flat), reduction="batchmean")
        if self.fault == "squared error":
            return F.mse_loss(logits, logits.detach().flip(-1))
        if self.fault == "mean by hand":
            return logits.square().mean(-1).mean()
        if self.fault == "temperature":
            logits = logits / ids.shape[1] ** 0.5
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def run_lines(code: str, **names: Any) -> dict[str, Any]:
    """Run two lines of code that a refusal shows, on what a user's step would have of their names."""
    names |= {"F": F, "torch": torch}
    exec(code, names)
    return names


class FollowsLines(Step):
    """Does what the two lines of a refusal say, where the fault was: in its part, or in its loss."""

    def __init__(self, fault: str, code: str) -> None:
        super().__init__("fine")
        self.lines = code
        if fault in PARTS:
            self.model.part = Module(self.part)

    def part(self, x: Tensor) -> Tensor:
        found = run_lines(self.lines, x=x, mask=torch.ones_like(x[..., 0]), input_ids=x[..., 0].long())
        if "length" in found:
            return x / found["length"] ** 0.5
        return found["pooled"][:, None] if "pooled" in found else found["x"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if "loss" not in self.lines:
            return super().training_step(batch, batch_idx)
        logits = self.model(batch["input_ids"], batch["position_ids"])
        names = {"logits": logits, "mask": batch["input_ids"] >= 0, "each": logits.square().mean(-1), **batch}
        names |= {"output": logits.squeeze(-1), "target": logits.detach().flip(-1)}
        return run_lines(self.lines, log_p=logits.log_softmax(-1), q=wanted(logits), **names)["loss"]


def wanted(logits: Tensor) -> Tensor:
    return logits.detach().flip(-1).softmax(-1)


def followed(cases: list[tuple[str, str]], strategy: dict[str, Any]) -> list[str]:
    """Fit one step of modules that follow the lines of refusals, and return what was refused."""
    return [_verdict_of(FollowsLines(*case), "64-true", strategy) for case in cases]


def verdicts(names: list[str], precision: str, strategy: dict[str, Any]) -> list[str]:
    """Fit one step of each and return what was refused."""
    return [_verdict(name, precision, strategy) for name in names]


def _verdict(name: str, precision: str, strategy: dict[str, Any]) -> str:
    return _verdict_of(Step(name), precision, strategy)


def _verdict_of(module: Step, precision: str, strategy: dict[str, Any]) -> str:
    try:
        trainer = quiet_trainer(2, strategy=strategy, max_steps=1, precision=precision)
        trainer.fit(module, DataLoader(TokenDataset(2, LENGTH), batch_size=2))
    except SequenceParallelError as refusal:
        return str(refusal)
    except Exception as other:
        return f"NOT BY NAME {other!r}: {traceback.format_exc()}"
    return ""
