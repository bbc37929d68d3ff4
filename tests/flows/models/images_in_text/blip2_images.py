"""BLIP-2: a Q-Former asks an image by a few queries, whose answers stand before the text of OPT."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY, Tuned, rows

IMAGE, NUM_QUERIES = 3, 4


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import Blip2Config, Blip2ForConditionalGeneration

    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4,
        "initializer_range": 0.2,
    }  # fmt: skip
    asking = {
        "hidden_size": 32, "encoder_hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.2, "vocab_size": VOCABULARY,
    }  # fmt: skip
    text = {
        "model_type": "opt", "vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": 0.0, "init_std": 0.2, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    config = Blip2Config(
        vision_config=vision, qformer_config=asking, text_config=text, num_query_tokens=NUM_QUERIES, image_token_index=IMAGE,
        image_text_hidden_size=32,
    )  # fmt: skip
    torch.manual_seed(6)
    samples = []
    for i, row in enumerate(rows(length=24)):
        ids, mask = row["input_ids"].clone(), torch.ones(24, dtype=torch.long)
        ids[:NUM_QUERIES] = IMAGE
        mask[24 - i % 4 :] = 0
        labels = ids.masked_fill((ids == IMAGE) | (mask == 0), -100)
        samples.append(
            {"input_ids": ids, "labels": labels, "attention_mask": mask, "pixel_values": torch.randn(3, 16, 16)}
        )
    module = Tuned(Blip2ForConditionalGeneration(config))
    torch.nn.init.normal_(module.model.query_tokens, std=0.5)  # alike they would stay alike
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
