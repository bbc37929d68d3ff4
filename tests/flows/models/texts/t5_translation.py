"""T5 on pairs of texts: labels alone, of another length than the input."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY, Tuned, rows


def main(batch_size: int, **options: Any) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    samples = [{"input_ids": row["input_ids"], "labels": row["shift_labels"][:12]} for i, row in enumerate(rows())]
    module = Tuned(
        T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY,
                d_model=32,
                d_kv=8,
                d_ff=48,
                num_layers=2,
                num_heads=4,
                dropout_rate=0.0,
                decoder_start_token_id=0,
                pad_token_id=0,
            )
        )
    )
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
