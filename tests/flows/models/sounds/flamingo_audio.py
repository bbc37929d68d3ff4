"""Audio Flamingo 3: sounds of two lengths with their mask, their tokens placed into padded text."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, rows, sizes

SOUND, FRAMES = 3, 32


def samples_of(tokens_of: dict[int, int], mask_name: str = "") -> list[dict[str, Tensor]]:
    """Texts with a sound each.

    Args:
        tokens_of: of the frames that a sound may have, how many tokens a model makes of them.
        mask_name: of the entry that says which frames are heard; empty for none.
    """
    samples = []
    generator = torch.Generator().manual_seed(6)
    for i, row in enumerate(rows(length=24)):
        ids, mask = row["input_ids"].clone(), torch.ones(24, dtype=torch.long)
        frames, tokens = list(tokens_of.items())[i % len(tokens_of)]
        ids[4 + i % 3 :][:tokens] = SOUND
        mask[24 - i % 4 :] = 0
        features = {"input_features": torch.randn(8, FRAMES, generator=generator)}
        if mask_name:
            features[mask_name] = (torch.arange(FRAMES) < frames).long()
        labels = ids.masked_fill((ids == SOUND) | (mask == 0), -100)
        samples.append({"input_ids": ids, "labels": labels, "attention_mask": mask, **features})
    return samples


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import AudioFlamingo3Config, AudioFlamingo3ForConditionalGeneration

    audio = {
        "model_type": "audioflamingo3_encoder", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "num_mel_bins": 8, "max_source_positions": FRAMES // 2, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(6)
    text = {"model_type": "qwen2", **sizes()}
    config = AudioFlamingo3Config(audio_config=audio, text_config=text, audio_token_id=SOUND)
    module = Tuned(AudioFlamingo3ForConditionalGeneration(config))
    samples = samples_of({32: 8, 24: 6}, "input_features_mask")
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
