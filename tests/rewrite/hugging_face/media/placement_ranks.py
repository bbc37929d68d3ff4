"""LLaVA on texts with images: what each rank runs in test_placement.py."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from lightning_sp import SequenceParallelError
from tests.flows.tiny import Tuned, sizes
from tests.trainer.tiny import quiet_trainer

IMAGE, PATCHES = 3, 9


def model() -> LlavaForConditionalGeneration:
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=12, patch_size=4, projection_dim=32
    )  # fmt: skip
    text = LlamaConfig(**sizes(num_hidden_layers=1))
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, image_seq_length=PATCHES, vision_feature_layer=-1)
    )  # fmt: skip


def sample(starts: tuple[int, ...], length: int, seed: int) -> dict[str, torch.Tensor]:
    """A row with an image at each start, some of them cut short by the next."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, 40, (length,), generator=g)
    for start in starts:
        ids[start : start + PATCHES] = IMAGE
    pixels = torch.randn(len(starts), 3, 12, 12, generator=g)
    return {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), "pixel_values": pixels}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    joined = {name: torch.stack([s[name] for s in samples]) for name in ("input_ids", "labels")}
    return {**joined, "pixel_values": torch.cat([s["pixel_values"] for s in samples])}


def fit(world: int, strategy: dict[str, Any] | None, starts: list[tuple[int, ...]], length: int) -> dict[str, Any]:
    """Fit on rows of images, two at a time; return the weights, or what was refused."""
    torch.manual_seed(3)
    module = Tuned(model())
    rows = [sample(each, length, seed) for seed, each in enumerate(starts)]
    options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    if strategy is None:
        trainer = pl.Trainer(accelerator="cpu", devices=1, precision="64-true", max_epochs=1, **options)
    else:
        trainer = quiet_trainer(world, strategy=strategy)
    try:
        trainer.fit(
            module,
            DataLoader(rows, batch_size=2 // (strategy or {}).get("data_parallel_size", 1), collate_fn=collate),
        )
    except SequenceParallelError as error:
        return {"error": str(error)}
    weights = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in module.named_parameters()}
    return {"error": "", "weights": {n: w.detach().clone() for n, w in weights.items()}}
