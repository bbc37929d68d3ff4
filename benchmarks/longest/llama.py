"""The model that every contestant trains: an unmodified Hugging Face Llama of 8 layers, dim 512, in float32, and AdamW."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LEARNING_RATE = 1e-4


def llama(problem: dict[str, Any]) -> LlamaForCausalLM:
    """Return the model with random weights, the same on all ranks; with a vocabulary of 100,000 and more its head is its embedding."""
    config = LlamaConfig(
        vocab_size=problem["vocab_size"], hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=2**24, tie_word_embeddings=problem["vocab_size"] >= 100_000, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return LlamaForCausalLM(config).train()


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all contestants."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
