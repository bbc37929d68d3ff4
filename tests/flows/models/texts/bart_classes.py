"""BART classifies texts of ragged lengths by their last token: a decoder that reads the encoder's own tokens"""

from __future__ import annotations

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY, Tuned, texts, tokenizer


def main(batch_size: int, **options: object) -> pl.LightningModule:
    from transformers import BartConfig, BartForSequenceClassification, DataCollatorWithPadding

    words = tokenizer(model_input_names=["input_ids", "attention_mask"])
    samples = [{**words(f"{text} <eos>"), "label": i % 3} for i, text in enumerate(texts(12))]
    loader = DataLoader(samples, batch_size=batch_size, collate_fn=DataCollatorWithPadding(words))
    config = BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        classifier_dropout=0.0, num_labels=3, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    module = Tuned(BartForSequenceClassification(config))
    pl.Trainer(max_epochs=1, **options).fit(module, loader)
    return module
