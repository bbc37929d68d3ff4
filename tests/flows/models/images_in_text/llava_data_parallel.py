"""LLaVA with sequence_parallel_size=1: data-parallel groups alone."""

from tests.flows.models.images_in_text.llava_images import main

__all__ = ["main"]
LAYOUTS = ["data 2"]
