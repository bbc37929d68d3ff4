"""Images for a model of text and images: inputs that its own tower takes, and as many placeholders in the text as the tower gives tokens.

Models take images in a few forms; the first that the model's `get_image_features` accepts is taken.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_sp.rewrite.hugging_face.media.placement import placeholder_ids
from tools.models.rules import FIRST_TOKEN, IGNORED

# Behind every padding on the left.
START = 12
# Of patches (frames, height, width): of two sizes, so that rows have other numbers of tokens.
GRIDS = ((1, 4, 4), (1, 4, 8))
NUM_IMAGES = len(GRIDS)
# What stands at an image's tokens in the entries of the text; elsewhere no target.
FILLERS = {"attention_mask": 1, "input_ids": FIRST_TOKEN}


def find_images(model: Any, generator: torch.Generator) -> tuple[list[dict[str, Tensor]], list[int]] | None:
    """Return each row's image as the model takes it and its number of tokens; None where no form is accepted.

    Args:
        model: of transformers.
        generator: of the pixels.
    """
    owner = next((each for each in model.modules() if hasattr(each, "get_image_features")), None)
    if owner is None or _token(model.config) is None:
        return None
    accepted = inspect.signature(owner.get_image_features).parameters
    for rows in _forms(model.config, generator):
        if not rows[0].keys() <= accepted.keys():
            continue
        try:
            with torch.no_grad():
                found = owner.get_image_features(**collate(rows), return_dict=True)
        except Exception:  # another form, then
            continue
        numbers = _numbers(getattr(found, "pooler_output", found))
        if numbers:
            return rows, numbers
    return None


def with_images(
    model: Any, batch: dict[str, Tensor], images: tuple[list[dict[str, Tensor]], list[int]]
) -> list[dict[str, Tensor]]:
    """Return a batch's rows, each with placeholders behind its first tokens and its image.

    Args:
        model: of transformers.
        batch: of tokens, (rows, tokens) each.
        images: of `find_images`.
    """
    placeholder, most = _token(model.config), max(images[1])
    assert placeholder is not None
    taken = inspect.signature(model.forward).parameters
    special = torch.tensor(placeholder_ids([model]))
    found = []
    for row, (image, number) in enumerate(zip(*images, strict=True)):
        placed = {}
        for name, values in batch.items():
            own, filler = values[row], FILLERS.get(name, IGNORED)
            if own.dim() == 0 or len(own) != len(batch["input_ids"][row]):
                placed[name] = own  # the decoder's
                continue
            placed[name] = torch.cat([own[:START], own.new_full((most,), filler), own[START:]])
        placed["input_ids"][torch.isin(placed["input_ids"], special)] = FIRST_TOKEN - 1
        here = torch.zeros(len(placed["input_ids"]), dtype=torch.bool)
        here[START : START + number] = True
        placed["input_ids"][here] = placeholder
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in taken:
                placed[name] = here.long()
        found.append({**placed, **image})
    return found


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack rows; patches of images of several sizes stand one after the other."""
    apart = {"pixel_values"} if "image_grid_thw" in rows[0] else set()
    return {name: (torch.cat if name in apart else torch.stack)([row[name] for row in rows]) for name in rows[0]}


def _token(config: Any) -> int | None:
    found = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    return next((int(each) for each in found if isinstance(each, int)), None)


def _numbers(features: Any) -> list[int]:
    """Return the tokens of each image, from one tensor for each or one of all."""
    if isinstance(features, (list, tuple)) and len(features) == NUM_IMAGES:
        return [each.flatten(0, -2).shape[0] for each in features]
    if isinstance(features, Tensor) and len(features) % NUM_IMAGES == 0:
        return [features.flatten(0, -2).shape[0] // NUM_IMAGES] * NUM_IMAGES
    return []


def _forms(config: Any, generator: torch.Generator) -> Iterator[list[dict[str, Tensor]]]:
    vision = getattr(config, "vision_config", config)
    channels = int(
        next((n for name in ("in_channels", "in_chans", "num_channels") if (n := getattr(vision, name, 0))), 3)
    )

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if isinstance(patch := getattr(vision, "patch_size", None), int):
        frames = (getattr(vision, "temporal_patch_size", None) or 1, 2)
        flat = [(channels * int(each) * patch * patch,) for each in dict.fromkeys(frames)]
        for shape in (*flat, (channels, patch, patch)):
            for grid in ((0, 1, 2), (1, 2)):
                yield [
                    {
                        "pixel_values": draw(each[0] * each[1] * each[2], *shape),
                        "image_grid_thw": torch.tensor([each[i] for i in grid]),
                    }
                    for each in GRIDS
                ]
    if isinstance(patch, int) and (pool := getattr(vision, "pooling_kernel_size", 0)):  # Gemma 4
        places = torch.cartesian_prod(*[torch.arange(2 * pool)] * 2).flip(1)
        yield [
            {"pixel_values": draw(len(places), channels * patch * patch).sigmoid(), "image_position_ids": places}
            for _ in GRIDS
        ]
    size = getattr(vision, "image_size", 32)
    size = size if isinstance(size, int) else size[-1]
    pixels = channels, size, size
    sizes = torch.tensor([size, size])
    yield [{"pixel_values": draw(*pixels)} for _ in GRIDS]
    yield [{"pixel_values": draw(*pixels), "image_sizes": sizes} for _ in GRIDS]
    question = {"qformer_input_ids": torch.arange(FIRST_TOKEN, START), "qformer_attention_mask": torch.ones(4).long()}
    yield [{"pixel_values": draw(*pixels), **question} for _ in GRIDS]
    for number in (1, 2, 5):
        yield [{"pixel_values": draw(number, *pixels)} for _ in GRIDS]
        yield [{"pixel_values": draw(number, *pixels), "image_sizes": sizes} for _ in GRIDS]
