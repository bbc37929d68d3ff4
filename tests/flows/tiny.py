"""What the flows share in place of a download: a tokenizer, texts, small models of transformers with random weights, a plain module."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS = [
    "the", "of", "a", "to", "in", "is", "on", "by", "it", "or", "be", "at", "as", "an", "we", "us", "if", "my", "do", "no",
    "red", "sea", "sky", "sun", "day", "bee", "cat", "dog", "hen", "fox", "map", "key", "cup", "hat", "box", "pen",
]  # fmt: skip
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<mask>", "<sep>"]
VOCABULARY = len(WORDS) + len(SPECIAL)


def tokenizer(**options: Any) -> Any:
    """A word for a token; padding is 0."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", mask_token="<mask>",
        cls_token="<bos>", sep_token="<sep>", **options,
    )  # fmt: skip


def texts(number: int, shortest: int = 5, longest: int = 19, seed: int = 0) -> list[str]:
    """Random words; each text has a length of its own."""
    drawn = random.Random(seed)
    return [" ".join(drawn.choices(WORDS, k=drawn.randint(shortest, longest))) for _ in range(number)]


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**sizes(**options)))


def sizes(**options: Any) -> dict[str, Any]:
    """Arguments of a configuration of transformers."""
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, **options,
    }  # fmt: skip


def bert_sizes(**options: Any) -> dict[str, Any]:
    """Arguments of a configuration of an encoder, without dropout."""
    found = sizes(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout=0.0, **options)
    return {name: value for name, value in found.items() if name not in ("num_key_value_heads", "eos_token_id")}


class Tuned(pl.LightningModule):
    """A model that is trained by its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


class WithBuffer(pl.LightningModule):
    """A model without its head, a head of the module's own, and a buffer that grows with each batch; AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama().model
        self.head = nn.Linear(32, VOCABULARY)
        self.register_buffer("scale", torch.ones(()))

    def loss(self, batch: Any) -> Tensor:
        logits = self.head(self.model(batch["input_ids"]).last_hidden_state) * self.scale
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.scale += 0.01

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def rows(number: int = 12, length: int = 18) -> list[dict[str, Tensor]]:
    """Random tokens, each with the one that follows."""
    ids = torch.randint(6, VOCABULARY, (number, length + 1), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row[:-1], "shift_labels": row[1:]} for row in ids]
