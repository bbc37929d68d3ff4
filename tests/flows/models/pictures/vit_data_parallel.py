"""A ViT classifies images with sequence_parallel_size=1: data-parallel groups alone."""

from tests.flows.models.pictures.vit_images import main

__all__ = ["main"]
LAYOUTS = ["data 2"]
