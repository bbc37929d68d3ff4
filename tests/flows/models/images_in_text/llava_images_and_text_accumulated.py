"""The same with accumulated gradients: images in one group's first micro-batch, and in none of the second."""

from __future__ import annotations

from typing import Any

from tests.flows.models.images_in_text import llava_images_and_text


def main(batch_size: int, **options: Any) -> Any:
    return llava_images_and_text.main(batch_size, accumulate_grad_batches=2, **options)
