"""What some model types take beside text, a picture or a sound: boxes, patches, pictures without placeholders, codes of several books."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tools.models.rules import END_OF_TOKENS, FIRST_TOKEN, IGNORED

Batch = dict[str, Tensor]
# Of a picture, and of what its patches hold: 3 colours x 8 x 8, of Pix2Struct 3 x 16 x 16.
PICTURE, NUM_PATCHES, PATCH, LARGE_PATCH = (3, 32, 32), 16, 192, 768
NUM_REGIONS, NUM_QUERIES, NUM_CODEBOOKS, NUM_CHANNELS = 6, 2, 4, 9
# A place beside the text's first tokens, behind every padding on the left.
START = 12
# Frames of a video, tokens of a canvas, and what stands in a text for a picture's tokens.
NUM_FRAMES, NUM_CANVAS, PLACEHOLDER = 4, 22, 90
# Longformer's, between a question and its text.
SEPARATOR = 2


class Draw:
    """Random entries for a batch's rows; a class because they share a generator."""

    def __init__(self, num_rows: int, num_tokens: int, generator: torch.Generator) -> None:
        self.num_rows, self.num_tokens, self.generator = num_rows, num_tokens, generator

    def normal(self, *shape: int) -> Tensor:
        """Return (rows, *shape)."""
        return torch.randn(self.num_rows, *shape, generator=self.generator)

    def ids(self, *shape: int, first: int = FIRST_TOKEN, end: int = END_OF_TOKENS) -> Tensor:
        """Return (rows, *shape) of whole numbers."""
        return torch.randint(first, end, (self.num_rows, *shape), generator=self.generator)

    def boxes(self) -> Tensor:
        """Return (rows, tokens, 4): left, top, right and bottom of each token, below 100."""
        corner = self.ids(self.num_tokens, 2, first=0, end=50)
        return torch.cat([corner, corner + self.ids(self.num_tokens, 2, first=0, end=50)], -1)


def with_extras(model_type: str, batch: Batch, generator: torch.Generator) -> Batch:
    """Return the batch with what its model takes beside.

    Args:
        model_type: of transformers.
        batch: (rows, ...) each.
        generator: of what is drawn.
    """
    if model_type not in EXTRAS:
        return batch
    first = batch.get("input_ids", next(iter(batch.values())))
    return EXTRAS[model_type](batch, Draw(len(first), first.shape[1] if first.dim() > 1 else 0, generator))


def _without(batch: Batch, *names: str) -> Batch:
    return {name: value for name, value in batch.items() if name not in names}


def _picture(batch: Batch, draw: Draw) -> Batch:
    return {**batch, "pixel_values": draw.normal(*PICTURE)}


def _picture_alone(batch: Batch, draw: Draw) -> Batch:
    return {**_without(batch, "input_ids", "attention_mask"), "pixel_values": draw.normal(*PICTURE)}


def _boxes(batch: Batch, draw: Draw) -> Batch:
    return {**batch, "bbox": draw.boxes()}


def _parts_of_boxes(batch: Batch, draw: Draw) -> Batch:
    return {**batch, "bbox": draw.boxes() / 100}


def _boxes_and_picture(batch: Batch, draw: Draw) -> Batch:
    return {**_boxes(batch, draw), **_picture({}, draw)}


def _parts_of_boxes_and_picture(batch: Batch, draw: Draw) -> Batch:
    return {**_parts_of_boxes(batch, draw), **_picture({}, draw)}


def _patches_of_two_sizes(batch: Batch, draw: Draw) -> Batch:
    shapes = torch.tensor([(4, 4) if row % 2 == 0 else (3, 4) for row in range(draw.num_rows)])
    mask = (torch.arange(NUM_PATCHES) < shapes.prod(1, keepdim=True)).long()
    patches = draw.normal(NUM_PATCHES, PATCH)
    return {
        **_without(batch, "pixel_values"),
        "pixel_values": patches,
        "pixel_attention_mask": mask,
        "spatial_shapes": shapes,
    }


def _numbered_patches(batch: Batch, draw: Draw) -> Batch:
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)) + 1
    patches = torch.cat([places.expand(draw.num_rows, -1, -1), draw.normal(NUM_PATCHES, LARGE_PATCH)], -1)
    mask = torch.ones(draw.num_rows, NUM_PATCHES)
    mask[1:, NUM_PATCHES - 3 :] = 0
    return {**_without(batch, "input_ids"), "flattened_patches": patches * mask[..., None], "attention_mask": mask}


def _placed_picture(batch: Batch, draw: Draw) -> Batch:
    here = torch.zeros_like(batch["input_ids"])
    here[:, START : START + NUM_QUERIES] = 1
    return {**_picture(batch, draw), "image_embeds_position_mask": here}


def _pictures_with_mask(batch: Batch, draw: Draw) -> Batch:
    seen = torch.ones(draw.num_rows, draw.num_tokens, 2, dtype=torch.long)
    seen[:, :START] = 0
    seen[:, : START + 6, 1] = 0  # the second picture comes later
    return {**batch, "pixel_values": draw.normal(2, *PICTURE), "image_attention_mask": seen}


def _regions(batch: Batch, draw: Draw) -> Batch:
    feats, places = draw.normal(NUM_REGIONS, 64), draw.normal(NUM_REGIONS, 4).sigmoid()
    answers = {"labels": torch.arange(draw.num_rows)}
    text = _without(batch, "start_positions", "end_positions")
    return {**text, **answers, "visual_feats": feats, "visual_pos": places}


def _codes_alone(batch: Batch, draw: Draw) -> Batch:
    labels = draw.ids(draw.num_tokens, NUM_CODEBOOKS)
    labels[0, 12:17] = IGNORED
    if "labels" in batch:
        return {"labels": labels}
    return {"input_ids": draw.ids(NUM_CODEBOOKS, draw.num_tokens), "targets": labels.transpose(1, 2)}


def _two_parts(batch: Batch, draw: Draw) -> Batch:
    if "start_positions" not in batch:
        return batch
    ids = batch["input_ids"].clone()
    ids[:, [START - 1, 20, 21]] = SEPARATOR
    return {**batch, "input_ids": ids}


def _speech_of_codes(batch: Batch, draw: Draw) -> Batch:
    """Return Dia's: a text, and the codes of a sound, a token's in one row each."""
    labels = draw.ids(NUM_CHANNELS, 22)
    labels[0, :, 17:] = IGNORED
    name = "labels" if "labels" in batch else "targets"
    ids = draw.ids(30)
    mask = torch.ones_like(ids)
    mask[1, 25:] = 0
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": draw.ids(22, NUM_CHANNELS), name: labels}


def _codes_beside_text(batch: Batch, draw: Draw) -> Batch:
    return {
        **batch,
        "input_ids": torch.cat([batch["input_ids"][..., None], draw.ids(draw.num_tokens, NUM_CODEBOOKS)], -1),
    }


def _protein(batch: Batch, draw: Draw) -> Batch:
    mask = torch.ones(draw.num_rows, NUM_PATCHES, dtype=torch.long)
    mask[1:, NUM_PATCHES - 3 :] = 0
    return {**batch, "protein_input_ids": draw.ids(NUM_PATCHES), "protein_attention_mask": mask}


def _canvas(batch: Batch, draw: Draw) -> Batch:
    targets = draw.ids(NUM_CANVAS)
    return {**_without(batch, "labels", "shift_labels"), "decoder_input_ids": draw.ids(NUM_CANVAS), "targets": targets}


def _placed(batch: Batch, number: int) -> Batch:
    """Return the batch with so many placeholders in its text, which have no target."""
    here = slice(START, START + number)
    found = dict(batch)
    for name in ("input_ids", "labels", "shift_labels"):
        if name in batch:
            found[name] = batch[name].clone()
            found[name][:, here] = PLACEHOLDER if name == "input_ids" else IGNORED
    return found


def _video(batch: Batch, draw: Draw) -> Batch:
    question = {"qformer_input_ids": draw.ids(5), "qformer_attention_mask": torch.ones(draw.num_rows, 5).long()}
    return {**_placed(batch, NUM_FRAMES * NUM_QUERIES), "pixel_values": draw.normal(NUM_FRAMES, *PICTURE), **question}


def _actions(batch: Batch, draw: Draw) -> Batch:
    """Return Pi0's: a picture and a text, and what an arm does, with noise in it."""
    text = _without(_placed(batch, NUM_PATCHES), "labels", "shift_labels")
    aim = {"actions": draw.normal(6, 32)} if "labels" in batch else {"targets": draw.ids(6, first=0, end=32)}
    seen = {"pixel_values": draw.normal(1, *PICTURE), "pixel_attention_mask": torch.ones(draw.num_rows, 1).bool()}
    return {
        **text,
        **seen,
        **aim,
        "state": draw.normal(32),
        "noise": draw.normal(6, 32),
        "timestep": draw.normal().sigmoid(),
    }


def _picture_of_formula(batch: Batch, draw: Draw) -> Batch:
    aim = batch["labels"] if "labels" in batch else batch["targets"]
    return {"decoder_input_ids": draw.ids(aim.shape[1]), **_picture_alone(batch, draw)}


def _one_channel(batch: Batch, draw: Draw) -> Batch:
    mask = torch.ones(draw.num_rows, draw.num_tokens, dtype=torch.long)
    mask[1:, draw.num_tokens * 3 // 4 :] = 0
    return {**batch, "input_values": batch["input_values"][:, None], "padding_mask": mask}


def _answer_as_written(batch: Batch, draw: Draw) -> Batch:
    """Return FSMT's, which shifts no labels: its decoder's tokens come beside them."""
    return batch if "labels" not in batch else {**batch, "decoder_input_ids": draw.ids(batch["labels"].shape[1])}


def _frames_for_tokens(batch: Batch, draw: Draw) -> Batch:
    return {**batch, "input_features": draw.normal(128, 8 * draw.num_tokens)}


def _stacked_frames(batch: Batch, draw: Draw) -> Batch:
    return {**batch, "input_features": draw.normal(64, 320)}


def _embedded_frames(batch: Batch, draw: Draw) -> Batch:
    return {**_without(batch, "input_ids"), "input_features": draw.normal(64, 64)}


def _types_of_tokens(batch: Batch, draw: Draw) -> Batch:
    return {**batch, "mm_token_type_ids": torch.zeros_like(batch["input_ids"])}


def _without_mask(batch: Batch, draw: Draw) -> Batch:
    return _without(batch, "attention_mask")


def _pixels_as_tokens(batch: Batch, draw: Draw) -> Batch:
    return {**_without(batch, "pixel_values"), "input_ids": draw.ids(NUM_PATCHES)}


EXTRAS: dict[str, Callable[[Batch, Draw], Batch]] = {
    "blip": _picture,
    "bros": _parts_of_boxes,
    "dia": _speech_of_codes,
    "diffusion_gemma": _canvas,
    "evolla": _protein,
    "fsmt": _answer_as_written,
    "git": _picture,
    "granite_speech5_ctc": _stacked_frames,
    "idefics": _pictures_with_mask,
    "imagegpt": _pixels_as_tokens,
    "instructblipvideo": _video,
    "kosmos-2": _placed_picture,
    "kyutai_speech_to_text": _codes_beside_text,
    "layoutlm": _boxes,
    "layoutlmv3": _boxes_and_picture,
    "lilt": _boxes,
    "longformer": _two_parts,
    "lxmert": _regions,
    "moonshine_streaming": _without_mask,  # it makes a float32 mask of it
    "musicgen": _codes_alone,
    "musicgen_melody": _codes_alone,
    "molmo2": _types_of_tokens,
    "omniasr_ctc": _one_channel,
    "pi0": _actions,
    "pix2struct": _numbered_patches,
    "pop2piano": _embedded_frames,
    "pp_formulanet": _picture_of_formula,
    "siglip2": _patches_of_two_sizes,
    "udop": _parts_of_boxes_and_picture,
    "vision-encoder-decoder": _picture_alone,
    "voxtral_realtime": _frames_for_tokens,
}
