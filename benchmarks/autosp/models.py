"""What both train, unmodified: a Llama of Hugging Face, and a GPT that counts its positions inside; in float32, with SGD."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 8_000
# Large enough that a step changes weights by more than rounding does.
LEARNING_RATE = 0.5


class _Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """nanoGPT's structure: learned positions by `arange`, labels shifted in the loss."""

    def __init__(self, dim: int, layers: int, heads: int, longest: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, dim), nn.Embedding(longest, dim)
        self.blocks = nn.ModuleList(_Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss. Shapes: (B, S), (B, S) -> ()."""
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def made(name: str, size: dict[str, int]) -> nn.Module:
    """Return a model with random weights, the same on all ranks.

    Args:
        name: "llama" or "gpt".
        size: dim, layers, heads and longest, the most tokens.
    """
    torch.manual_seed(0)
    if name == "gpt":
        return GPT(**size).train()
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=size["dim"], intermediate_size=3 * size["dim"], num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"], num_key_value_heads=size["heads"] // 2, max_position_embeddings=size["longest"], use_cache=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config).train()


def loss_of(model: Any, name: str, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss as the model's user writes it."""
    found: Any = model(**batch)
    loss: Tensor = found if name == "gpt" else found.loss
    return loss


def batch_of(name: str, length: int, number: int) -> dict[str, Tensor]:
    """Return a batch of one row, the same on all ranks."""
    ids = torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(number))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if name == "llama":
        batch["position_ids"] = torch.arange(length)[None]
    return batch
