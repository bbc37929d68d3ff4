"""The batches of a case: three, one without padding, one padded on the right, one on the left."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tools.models.extras import with_extras
from tools.models.images import find_images, with_images
from tools.models.registry import Case
from tools.models.rules import END_OF_TOKENS, FIRST_TOKEN, IGNORED

# No multiple of any degree; the decoder's is another than the encoder's.
ROWS, LENGTH, DECODER_LENGTH = 2, 30, 22
# On the right fewer than a window of the tiny models, so that padding's queries see a token too.
PADDED = {"none": (0, 0), "right": (2, 5), "left": (4, 11)}
# The preflight looks at the first batch: it has no padding for one form, and some for the other.
SIDES = {"own loss": ("none", "right", "left"), "logits": ("left", "right", "none")}
FORMS = tuple(SIDES)
# Kinds of class whose rows hold an image, where one is found that the model takes.
WITH_IMAGES = ("image-text LM", "multimodal LM", "causal LM")
# Of a sound: as samples, or as frames of a spectrogram.
NUM_SAMPLES, NUM_FRAMES = 6400, 64
# Whisper's are (features, frames), all others' are (frames, features).
FRAMES_DIM = {"whisper": 2}
# Whose own loss asks for the mask of the sounds.
SOUNDS_WITH_MASK = ("granite_speech5_ctc", "lasr_ctc", "parakeet_ctc")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A class of model, trained in one form.

    Args:
        case: the class.
        form: how the loss is computed.
        sides: on which each batch is padded.
        wide: the model's own casts to float32 give float64.
        images: a row of a model of text and images holds an image, where one is known that it takes.
    """

    case: Case
    form: str
    sides: tuple[str, ...]
    wide: bool = False
    images: bool = True

    @classmethod
    def of(cls, case: Case, form: str) -> Trial:
        """Return the trial with batches of every padding."""
        return cls(case=case, form=form, sides=SIDES[form])

    @property
    def without_left(self) -> Trial:
        """The same with right padding in place of left: some models attend to nothing then, and give NaN on one device too."""
        return replace(self, sides=tuple("right" if side == "left" else side for side in self.sides))


class Batches(Dataset[dict[str, Tensor]]):
    """The rows of three batches in their order; a class because a DataLoader takes one."""

    def __init__(self, trial: Trial, model: Any) -> None:
        generator = torch.Generator().manual_seed(7)
        make = _MAKERS[trial.case.kind]
        batches = [
            with_extras(trial.case.model_type, make(model, trial.form, side, generator), generator)
            for side in trial.sides
        ]
        images = find_images(model, generator) if trial.images and trial.case.kind in WITH_IMAGES else None
        self.num_images = 0 if images is None else len(trial.sides) * ROWS
        self.rows = [
            each
            for batch in batches
            for each in (
                [{name: value[row] for name, value in batch.items()} for row in range(ROWS)]
                if images is None
                else with_images(model, batch, images)
            )
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def _tokens(model: Any, side: str, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return ids and mask, (ROWS, length) both."""
    config = model.config.get_text_config(decoder=True)
    end = min(END_OF_TOKENS, getattr(config, "vocab_size", None) or END_OF_TOKENS)
    ids = torch.randint(FIRST_TOKEN, end, (ROWS, length), generator=generator)
    mask = torch.ones_like(ids)
    for row, count in enumerate(PADDED[side]):
        if count:
            mask[row, slice(length - count, None) if side == "right" else slice(0, count)] = 0
    pad = getattr(config, "pad_token_id", None) or 0
    return ids.masked_fill(mask == 0, pad), mask


def _causal(model: Any, form: str, side: str, generator: torch.Generator) -> dict[str, Tensor]:
    ids, mask = _tokens(model, side, LENGTH, generator)
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[0, 12:17] = IGNORED  # a prompt, so that ranks hold different counts
    if form == "own loss":
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}
    shifted = torch.cat([labels[:, 1:], torch.full((ROWS, 1), IGNORED)], 1)
    return {"input_ids": ids, "attention_mask": mask, "shift_labels": shifted}


def _masked(model: Any, form: str, side: str, generator: torch.Generator) -> dict[str, Tensor]:
    ids, mask = _tokens(model, side, LENGTH, generator)
    hidden = (torch.rand(ids.shape, generator=generator) < 0.3) & (mask == 1)
    labels = ids.masked_fill(~hidden, IGNORED)
    return {"input_ids": ids.masked_fill(hidden, 4), "attention_mask": mask, _target(form): labels}


def _seq2seq(model: Any, form: str, side: str, generator: torch.Generator) -> dict[str, Tensor]:
    if not getattr(model.config, "is_encoder_decoder", False):
        return _causal(model, form, side, generator)  # an encoder of sounds or images in front of a decoder of text
    ids, mask = _tokens(model, side, LENGTH, generator)
    # A decoder's row is padded behind its end, whatever its encoder's is.
    labels, decoder_mask = _tokens(model, "none" if side == "none" else "right", DECODER_LENGTH, generator)
    labels = labels.masked_fill(decoder_mask == 0, IGNORED)
    batch = {"input_ids": ids, "attention_mask": mask, _target(form): labels}
    if form == "logits":
        config = model.config
        start = getattr(config, "decoder_start_token_id", None) or 0
        shifted = torch.cat([torch.full((ROWS, 1), start), labels[:, :-1]], 1)
        batch["decoder_input_ids"] = shifted.masked_fill(shifted == IGNORED, getattr(config, "pad_token_id", None) or 0)
    return batch


def _token_classes(model: Any, form: str, side: str, generator: torch.Generator) -> dict[str, Tensor]:
    ids, mask = _tokens(model, side, LENGTH, generator)
    labels = (ids % int(model.config.num_labels)).masked_fill(mask == 0, IGNORED)
    return {"input_ids": ids, "attention_mask": mask, _target(form): labels}


def _row_classes(model: Any, form: str, side: str, generator: torch.Generator) -> dict[str, Tensor]:
    ids, mask = _tokens(model, side, LENGTH, generator)
    if getattr(model.config, "is_encoder_decoder", False):
        # Classified by the last end-of-sequence token: each row has one.
        last = LENGTH - 1 - mask.flip(1).argmax(1)
        ids[torch.arange(ROWS), last] = model.config.eos_token_id
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(ROWS) % int(model.config.num_labels)}


def _spans(model: Any, form: str, side: str, generator: torch.Generator) -> dict[str, Tensor]:
    ids, mask = _tokens(model, side, LENGTH, generator)
    starts = torch.randint(12, 15, (ROWS,), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "start_positions": starts, "end_positions": starts + 3}


def _pictures(model: Any, form: str, side: str, generator: torch.Generator) -> dict[str, Tensor]:
    vision = getattr(model.config, "vision_config", model.config)
    size = getattr(vision, "image_size", 32)
    height, width = (size, size) if isinstance(size, int) else size[-2:]
    frames = [int(vision.num_frames)] if hasattr(vision, "num_frames") else []
    if hasattr(vision, "frames_per_clip"):
        frames = [int(vision.frames_per_clip)]
    pixels = torch.randn(ROWS, *frames, int(getattr(vision, "num_channels", 3)), height, width, generator=generator)
    taken = inspect.signature(model.forward).parameters
    name = "pixel_values_videos" if "pixel_values_videos" in taken else "pixel_values"
    return {name: pixels, _target(form): torch.arange(ROWS) % int(model.config.num_labels)}


def _sounds(model: Any, form: str, generator: torch.Generator) -> dict[str, Tensor]:
    """Return samples or a spectrogram, whichever the model's main input is."""
    config, main = model.config, model.main_input_name
    if main == "inputs":  # of a composite, whose encoder decides
        main = model.encoder.main_input_name
    if main == "input_values":
        return {"input_values": torch.randn(ROWS, NUM_SAMPLES, generator=generator)}
    names = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim")
    encoder = getattr(config, "encoder_config", config)
    features = next(
        (
            int(value)
            for name in names
            for each in (config, encoder)
            if isinstance(value := getattr(each, name, None), int)
        ),
        80,
    )
    frames = 2 * int(config.max_source_positions) if hasattr(config, "max_source_positions") else NUM_FRAMES
    shape = (features, frames) if FRAMES_DIM.get(config.model_type) == 2 else (frames, features)
    return {main: torch.randn(ROWS, *shape, generator=generator)}


def _transcripts(model: Any, form: str, side: str, generator: torch.Generator) -> dict[str, Tensor]:
    if model.main_input_name == "input_ids" and not model.config.is_encoder_decoder:
        return _causal(model, form, side, generator)  # sounds stand in its text, as images do
    labels, _ = _tokens(model, "none", DECODER_LENGTH, generator)
    sounds = _sounds(model, form, generator)
    if "attention_mask" in inspect.signature(model.forward).parameters:
        # Of the sound: another row's end is silence where texts are padded.
        mask = torch.ones(ROWS, next(iter(sounds.values())).shape[FRAMES_DIM.get(model.config.model_type, 1)])
        mask[1, (mask.shape[1] if side == "none" else mask.shape[1] * 3 // 4) :] = 0
        sounds["attention_mask"] = mask.long()
    if form == "own loss":
        return {**sounds, "labels": labels}
    start = torch.full((ROWS, 1), getattr(model.config, "decoder_start_token_id", None) or 0)
    return {**sounds, "decoder_input_ids": torch.cat([start, labels[:, :-1]], 1), "targets": labels}


def _short_transcripts(model: Any, form: str, side: str, generator: torch.Generator) -> dict[str, Tensor]:
    vocabulary = int(getattr(model.config, "vocab_size", 0) or 32)
    sounds = _sounds(model, form, generator)
    if model.config.model_type in SOUNDS_WITH_MASK:
        mask = torch.ones(ROWS, next(iter(sounds.values())).shape[1], dtype=torch.long)
        mask[1, mask.shape[1] * 3 // 4 :] = 0
        sounds["attention_mask"] = mask
    return {
        **sounds,
        "labels": torch.randint(1, min(vocabulary, 80), (ROWS, 4), generator=generator),
    }


def _sound_classes(model: Any, form: str, side: str, generator: torch.Generator) -> dict[str, Tensor]:
    length = int(getattr(model.config, "max_length", NUM_FRAMES))
    features = int(getattr(model.config, "num_mel_bins", 80))
    values = torch.randn(ROWS, length, features, generator=generator)
    return {"input_values": values, _target(form): torch.arange(ROWS) % int(model.config.num_labels)}


def _target(form: str) -> str:
    return "labels" if form == "own loss" else "targets"


_MAKERS = {
    "causal LM": _causal,
    "image-text LM": _seq2seq,
    "multimodal LM": _causal,
    "masked LM": _masked,
    "seq2seq LM": _seq2seq,
    "sequence classification": _row_classes,
    "token classification": _token_classes,
    "question answering": _spans,
    "image classification": _pictures,
    "video classification": _pictures,
    "audio classification": _sound_classes,
    "speech seq2seq": _transcripts,
    "speech CTC": _short_transcripts,
}


def forms_of(kind: str) -> tuple[str, ...]:
    """Return the forms in which a kind of class is tried."""
    return FORMS[:1] if kind in ("sequence classification", "question answering", "speech CTC") else FORMS
