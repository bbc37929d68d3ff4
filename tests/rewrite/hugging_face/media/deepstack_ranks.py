"""What each rank runs in test_deepstack.py."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.flows.models.images_in_text.qwen3_vl_images import model
from tests.flows.models.images_in_text.qwen_vl_images import collate, samples_of
from tests.flows.tiny import Tuned
from tests.trainer.tiny import quiet_trainer


def refusal(has_videos: bool, preflight: bool) -> str:
    """Fit Qwen3-VL on parts of rows that hold an image, and a video or none; return what is refused."""
    torch.manual_seed(6)
    samples = samples_of()[:2]
    for sample in samples if has_videos else ():
        sample["pixel_values_videos"] = sample["pixel_values"][None]
        sample["video_grid_thw"] = sample["image_grid_thw"]
    loader = DataLoader(samples, batch_size=1, collate_fn=collate)
    try:
        quiet_trainer(2, strategy=dict(ring_size=2, preflight=preflight), max_steps=1).fit(Tuned(model()), loader)
    except SequenceParallelError as error:
        return str(error)
    return "not refused"
