"""Whisper: sounds that the encoder reads, labels of ragged lengths, validated before the first step; a loss of its own."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY, Tuned, rows


class Transcriber(Tuned):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    labels = pad_sequence([each["labels"] for each in samples], batch_first=True, padding_value=-100)
    return {"input_features": torch.stack([each["input_features"] for each in samples]), "labels": labels}


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=16, max_target_positions=64,
        dropout=0.0, init_std=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    torch.manual_seed(6)
    samples = [
        {"input_features": torch.randn(8, 32), "labels": row["input_ids"][: 11 + i % 5]} for i, row in enumerate(rows())
    ]
    module = Transcriber(WhisperForConditionalGeneration(config))
    loader = DataLoader(samples, batch_size=batch_size, collate_fn=collate)
    # Of one length: a mean over groups weighs them alike.
    validation = [{**each, "labels": each["labels"][:10]} for each in samples]
    trainer = pl.Trainer(max_epochs=1, **{**options, "num_sanity_val_steps": 1})
    trainer.fit(module, loader, DataLoader(validation, batch_size=batch_size, collate_fn=collate))
    return module
