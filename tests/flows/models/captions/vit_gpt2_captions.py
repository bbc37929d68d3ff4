"""VisionEncoderDecoderModel: ViT reads an image, GPT-2 writes its caption of ragged length, without the preflight."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY, Tuned, rows

STRATEGY = {"preflight": False}
SIDE, PATCH = 16, 4


def vision_sizes() -> dict[str, Any]:
    """Arguments of a configuration of ViT: 17 tokens for each image."""
    return {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": SIDE,
        "patch_size": PATCH, "initializer_range": 0.2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    labels = pad_sequence([each["labels"] for each in samples], batch_first=True, padding_value=-100)
    return {"pixel_values": torch.stack([each["pixel_values"] for each in samples]), "labels": labels}


def captions() -> list[dict[str, Tensor]]:
    return [
        {"pixel_values": torch.randn(3, SIDE, SIDE), "labels": row["input_ids"][: 11 + i % 5]}
        for i, row in enumerate(rows())
    ]


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import GPT2Config, GPT2LMHeadModel, VisionEncoderDecoderModel, ViTConfig, ViTModel

    torch.manual_seed(6)
    decoder = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            add_cross_attention=True,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    model = VisionEncoderDecoderModel(
        encoder=ViTModel(ViTConfig(**vision_sizes()), add_pooling_layer=False), decoder=decoder
    )
    model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
    module = Tuned(model)
    loader = DataLoader(captions(), batch_size=batch_size, collate_fn=collate)
    pl.Trainer(max_epochs=1, **options).fit(module, loader)
    return module
