"""The peak of a rank's training step in the global view, by how a model makes its causal mask, beside the default's: bytes.

    python -m benchmarks.memory.global_view --tokens 4096 8192

A GPT as users write it: `--layers` blocks, dim 64, 4 heads, vocabulary 256, float32, learned positions, one row, a ring of 2 ranks.
What is alive before the step does not count. In units of S x S bytes, what a bool mask of the whole takes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.instruments.resident import peak_growth
from lightning_sp import SequenceParallelStrategy
from lightning_sp.testing import RankPool

DIM, HEADS, VOCABULARY, STEPS = 64, 4, 256, 2


def written(hide: Callable[[Any, int], Any]) -> Callable[..., Any]:
    """Return an attention that is written out, with what hides later keys in its scores."""

    def attend(q: Any, k: Any, v: Any, module: nn.Module) -> Any:
        scores = hide(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), q.shape[-2])
        return scores.softmax(-1) @ v

    return attend


def of_torch(mask: Callable[[int], Tensor | None]) -> Callable[..., Any]:
    """Return torch's own attention with a mask."""

    def attend(q: Any, k: Any, v: Any, module: nn.Module) -> Any:
        made = mask(q.shape[-2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=made, is_causal=made is None)

    return attend


def _earlier(tokens: int) -> Tensor:
    places = torch.arange(tokens)
    return places[:, None] >= places[None, :]


def _window(tokens: int) -> Tensor:
    places = torch.arange(tokens)
    distance = places[:, None] - places[None, :]
    return (distance >= 0) & (distance < 512)


def _buffer(q: Any, k: Any, v: Any, module: Any) -> Any:
    tokens = q.shape[-2]
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.masked_fill(module.bias[:, :, :tokens, :tokens] == 0, -torch.inf).softmax(-1) @ v


ATTENTIONS: dict[str, Callable[..., Any]] = {
    "is_causal=True": of_torch(lambda tokens: None),
    "tril of ones": written(lambda x, n: x.masked_fill(torch.tril(torch.ones(n, n)) == 0, -torch.inf)),
    "triu of -inf, added": written(lambda x, n: x + torch.triu(torch.full((n, n), -torch.inf), 1)),
    "arange >= arange": written(lambda x, n: x.masked_fill(~_earlier(n), -torch.inf)),
    "a window of comparisons of arange": written(lambda x, n: torch.where(_window(n), x, -torch.inf)),
    "a buffer": _buffer,
    "attn_mask=arange >= arange": of_torch(_earlier),
    "attn_mask=square_subsequent": of_torch(nn.Transformer.generate_square_subsequent_mask),
}


class Block(nn.Module):
    """As nanoGPT's."""

    def __init__(self, attention: str, tokens: int) -> None:
        super().__init__()
        self.attend = ATTENTIONS[attention]
        self.norms = nn.ModuleList([nn.LayerNorm(DIM), nn.LayerNorm(DIM)])
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        if attention == "a buffer":
            self.register_buffer("bias", torch.tril(torch.ones(tokens, tokens)).view(1, 1, tokens, tokens))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (y.view(b, s, HEADS, -1).transpose(1, 2) for y in self.qkv(self.norms[0](x)).split(DIM, 2))
        x = x + self.out(self.attend(q, k, v, self).transpose(1, 2).reshape(b, s, DIM))
        return x + self.mlp(self.norms[1](x))


class User(pl.LightningModule):
    """What a user writes; it measures the last step."""

    def __init__(self, attention: str, tokens: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.positions = nn.Embedding(VOCABULARY, DIM), nn.Embedding(tokens, DIM)
        self.blocks = nn.ModuleList([Block(attention, tokens) for _ in range(layers)])
        self.head, self.peak_bytes = nn.Linear(DIM, VOCABULARY), 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        places = batch.get("position_ids", torch.arange(ids.shape[1]))
        x = self.embedding(ids) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["shift_labels"].flatten())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS - 1:
            self._growth = peak_growth()
            self._measured = self._growth.__enter__()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS - 1:
            self._growth.__exit__(None, None, None)
            self.peak_bytes = self._measured.peak_bytes

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def peak(attention: str, tokens: int, layers: int, global_view: bool) -> int:
    """Return the most bytes of this rank's last step, above its begin."""
    user = User(attention, tokens, layers)
    ids = torch.randint(VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(0))
    row = {"input_ids": ids, "shift_labels": ids.roll(-1)} | (
        {} if global_view else {"position_ids": torch.arange(tokens)}
    )
    strategy = SequenceParallelStrategy(preflight=False, ring_size=2, global_view=global_view)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        max_epochs=1, strategy=strategy,
    )  # fmt: skip
    trainer.fit(user, DataLoader([row] * STEPS, batch_size=1))  # type: ignore[arg-type]
    return user.peak_bytes


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=list(ATTENTIONS))
    given = parser.parse_args()
    print("| attention | " + " | ".join(f"S = {tokens}: MiB, S x S bytes" for tokens in given.tokens) + " |")
    print("|---|" + "---|" * len(given.tokens), flush=True)
    cases = [(each, True) for each in given.only if each in ATTENTIONS]
    for attention, global_view in [("is_causal=True", False), *cases]:
        cells = []
        for tokens in given.tokens:
            with RankPool(2, timeout_s=900.0) as pool:
                most = max(pool.run(peak, attention, tokens, given.layers, global_view))
            cells.append(f"{most / 2**20:.0f}, {most / tokens**2:.1f}")
        name = attention if global_view else f"{attention}, the default"
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
