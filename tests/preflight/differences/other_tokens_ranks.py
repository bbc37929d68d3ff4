"""What each rank runs in test_other_tokens.py: models that attend to images besides their sequence, and the same on one process."""

from __future__ import annotations

import traceback
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.trainer.tiny import VOCAB, Plain, TokenDataset, quiet_trainer


class Attention(nn.Module):
    """Attention from one kind of tokens to another, or the same."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor, causal: bool = False) -> Tensor:
        q, k, v = (
            layer(tokens).unflatten(-1, (2, 8)).transpose(1, 2)
            for layer, tokens in ((self.q, x), (self.k, y), (self.v, y))
        )
        return F.scaled_dot_product_attention(q, k, v, None, self.dropout, causal).transpose(1, 2).flatten(2)


class Tower(nn.Module):
    """Patches of an image that attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, pixels: Tensor) -> Tensor:
        for layer in self.layers:
            pixels = pixels + layer(pixels, pixels)
        return pixels


class Reader(nn.Module):
    """A decoder that sees an image in a way of choice."""

    def __init__(self, way: str, latents: int = 8) -> None:
        super().__init__()
        self.way = way
        self.embedding, self.positions, self.head = nn.Embedding(VOCAB, 16), nn.Embedding(128, 16), nn.Linear(16, VOCAB)
        self.tower, self.attention, self.cross = Tower(), Attention(), Attention()
        if way == "dropout":
            self.tower.layers[0].dropout = 0.5
        self.latents = nn.Parameter(torch.randn(latents, 16))

    def forward(self, ids: Tensor, positions: Tensor, pixels: Tensor | None) -> Tensor:
        x = self.embedding(ids) + self.positions(positions)
        if pixels is None:
            latents = self.latents.expand(len(x), -1, -1)
            pair = {"learned queries": (latents, x), "learned keys": (x, latents), "learned both": (latents, latents)}
            return self.head(x + self.attention(x, x, True) + self.cross(*pair[self.way]).mean(1, keepdim=True))
        image = self.tower(pixels)
        x = x + self.attention(x, x, True)
        if self.way in ("mean", "dropout"):
            x = x + image.mean(1, keepdim=True)
        if self.way == "cross":
            x = x + self.cross(x, image)
        if self.way == "latents":
            x = x + self.cross(self.latents.expand(len(x), -1, -1), x).mean(1, keepdim=True)
        if self.way == "shared":
            x = x + self.attention(x, image)
        return self.head(x)


class Model(Plain):
    def __init__(self, way: str, latents: int = 8) -> None:
        super().__init__(None)
        torch.manual_seed(3)
        self.model = Reader(way, latents)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"], batch["position_ids"], batch.get("pixels"))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        self.losses.append(float(loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        used = {n: p.grad for n, p in self.named_parameters() if p.grad is not None}
        self.raw_grads.append({n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in used.items()})


def rows_of(patches: int, length: int) -> list[dict[str, Tensor]]:
    data, g = TokenDataset(2, length), torch.Generator().manual_seed(2)
    return [{**data[i], "pixels": torch.randn(patches, 16, generator=g, dtype=torch.float64)} for i in range(2)]


def one_process(way: str, patches: int, length: int, **_: Any) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    module, rows = Model(way).double(), rows_of(patches, length)
    module.training_step({name: torch.stack([row[name] for row in rows]) for name in rows[0]}, 0).backward()
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def sharded(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_sharded(**case) for case in cases]


def _sharded(way: str, patches: int, length: int, strategy: Any = None) -> dict[str, Any]:
    learned = way.startswith("learned")
    module, rows = Model(way, patches if learned else 8), rows_of(patches, length)
    if learned:
        rows = [{name: each for name, each in row.items() if name != "pixels"} for row in rows]
    try:
        trainer = quiet_trainer(2, strategy=strategy or {}, max_steps=1)
        trainer.fit(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
        error = ""
    except SequenceParallelError as refusal:
        error = str(refusal)
    except Exception as other:
        error = f"NOT BY NAME {other!r}: {traceback.format_exc()}"
    return {"error": error, "grads": module.raw_grads[-1] if module.raw_grads else {}}


class OneFails(Plain):
    """Fails on one rank, before its attention, with an error of its own."""

    def __init__(self) -> None:
        super().__init__(None)
        torch.manual_seed(3)
        self.model = Reader("none")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch["input_ids"].shape[1] < 64 and self.global_rank == 1:
            raise IndexError("this rank's own")
        logits = self.model(batch["input_ids"], batch["position_ids"], batch["pixels"])
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())


def one_fails(world: int, global_view: Any) -> str:
    module = OneFails()
    try:
        trainer = quiet_trainer(world, strategy={"global_view": global_view}, max_steps=1)
        trainer.fit(module, DataLoader(rows_of(9, 96), batch_size=2))  # type: ignore[arg-type]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
