"""The model that every contestant trains: an unmodified Hugging Face Llama of 8 layers, dim 512, in float32, and AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

LEARNING_RATE = 1e-4


def llama(problem: dict[str, Any], begin_part: Callable[[str], None] | None = None) -> LlamaForCausalLM:
    """Return the model with random weights, the same on all ranks; with a vocabulary of 100,000 and more its head is its embedding.

    Args:
        problem: the vocabulary's size.
        begin_part: is told where a step is: in the blocks, in the loss between their forward and backward, or in the rest (the embedding, the
            optimizer). Each has a peak of its own, whose line over lengths has its own constant.
    """
    config = LlamaConfig(
        vocab_size=problem["vocab_size"], hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=2**24, tie_word_embeddings=problem["vocab_size"] >= 100_000, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    if begin_part is not None:
        model.model.embed_tokens.register_forward_hook(_between(begin_part, "blocks", "rest"))
        model.model.norm.register_forward_pre_hook(
            lambda norm, args: _between(begin_part, "loss", "blocks")(norm, (), args[0])
        )
    return model


def _between(
    begin_part: Callable[[str], None], forward: str, backward: str
) -> Callable[[torch.nn.Module, Any, Tensor], None]:
    """Return a hook that begins a part behind a tensor's forward, and another before what is behind it in the backward."""

    def hook(module: torch.nn.Module, args: Any, between: Tensor) -> None:
        begin_part(forward)
        if between.requires_grad:
            between.register_hook(lambda gradient: begin_part(backward))

    return hook


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all contestants."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
