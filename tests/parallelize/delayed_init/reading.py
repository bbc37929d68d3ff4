"""Tiny checkpoints of transformers on disk, of each kind that reading treats in a way of its own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
FILE = "model.safetensors"


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(8)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": False, **options}))


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(8)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(8)
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32))


def _edit(folder: Path, change: Any) -> None:
    state = load_file(folder / FILE)
    change(state)
    save_file(state, folder / FILE, metadata={"format": "pt"})


def write(name: str, folder: Path) -> None:
    """Write a checkpoint by its name in `READ`."""
    tied = dict(tie_word_embeddings=True)
    if name == "split over files":
        llama().save_pretrained(folder, max_shard_size="20KB")
    elif name in ("one file", "as bfloat16", "another head", "no head"):
        llama().save_pretrained(folder)
    elif name == "experts apart":  # as Mixtral's files on the hub: transformers merges them
        mixtral().save_pretrained(folder)
    elif name == "old names":
        gpt2().save_pretrained(folder)
    elif name == "of bfloat16":
        llama().to(torch.bfloat16).save_pretrained(folder)
    elif name == "tied":
        llama(**tied).save_pretrained(folder)
    elif name.startswith("both of a tie"):
        llama(**tied).save_pretrained(folder)
        head = 1.0 if "unequal" in name else 0.0
        _edit(
            folder,
            lambda state: state.update({"lm_head.weight": copy.deepcopy(state["model.embed_tokens.weight"]) + head}),
        )
    elif name == "parts missing":
        llama().save_pretrained(folder)
        _edit(folder, lambda state: [state.pop(each) for each in list(state) if "layers.1.mlp" in each])
    elif name == "parts too many":
        llama().save_pretrained(folder)
        _edit(folder, lambda state: state.update({"vision.weight": torch.ones(3, 3)}))
    elif name == "pickle":
        llama().save_pretrained(folder)
        torch.save(load_file(folder / FILE), folder / "pytorch_model.bin")
        (folder / FILE).unlink()
    else:
        raise ValueError(name)


def read(name: str, folder: Path) -> nn.Module:
    """Read a checkpoint as a user would."""
    import transformers

    causal = transformers.AutoModelForCausalLM
    if name == "as bfloat16":
        model = causal.from_pretrained(folder, dtype=torch.bfloat16)
    elif name == "another head":
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    elif name == "no head":
        model = transformers.AutoModel.from_pretrained(folder)
    elif name == "tied":
        model = causal.from_pretrained(folder, device_map="cpu")
        model.resize_token_embeddings(70)
    else:
        model = causal.from_pretrained(folder)
    found: nn.Module = model
    return found


READ = (
    "one file", "split over files", "experts apart", "old names", "as bfloat16", "of bfloat16", "another head", "no head", "tied",
    "both of a tie, equal", "both of a tie, unequal", "parts missing", "parts too many", "pickle",
)  # fmt: skip
