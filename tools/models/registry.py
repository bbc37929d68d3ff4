"""Which model types there are, by transformers' own registries, and which class stands for each."""

from __future__ import annotations

from dataclasses import dataclass

# Kind of class -> transformers' registry of it. Of a type in several, the first is its entry.
ENTRIES = {
    "seq2seq LM": "SEQ_TO_SEQ_CAUSAL_LM",
    "speech seq2seq": "SPEECH_SEQ_2_SEQ",
    "masked LM": "MASKED_LM",
    "causal LM": "CAUSAL_LM",
    "image-text LM": "IMAGE_TEXT_TO_TEXT",
    "multimodal LM": "MULTIMODAL_LM",
    "speech CTC": "CTC",
    "image classification": "IMAGE_CLASSIFICATION",
    "audio classification": "AUDIO_CLASSIFICATION",
    "video classification": "VIDEO_CLASSIFICATION",
}
HEADS = {
    "sequence classification": "SEQUENCE_CLASSIFICATION",
    "token classification": "TOKEN_CLASSIFICATION",
    "question answering": "QUESTION_ANSWERING",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A class of transformers to try.

    Args:
        model_type: as in its configuration.
        kind: of class, a key of `ENTRIES` or `HEADS`.
        class_name: of transformers.
    """

    model_type: str
    kind: str
    class_name: str

    @property
    def name(self) -> str:
        """How it is called on the command line and in the file of answers."""
        return f"{self.model_type} ({self.kind})"


def entries() -> list[Case]:
    """Return one case for each model type with a text, vision or speech class."""
    found: dict[str, Case] = {}
    for kind, registry in ENTRIES.items():
        for model_type, class_name in _registry(registry).items():
            found.setdefault(model_type, Case(model_type=model_type, kind=kind, class_name=class_name))
    return list(found.values())


def heads() -> list[Case]:
    """Return a case for each head of each model type."""
    return [
        Case(model_type=model_type, kind=kind, class_name=class_name)
        for kind, registry in HEADS.items()
        for model_type, class_name in _registry(registry).items()
    ]


def left_out() -> dict[str, str]:
    """Return the model types without an entry, each with its reason."""
    from transformers.models.auto import configuration_auto, modeling_auto  # noqa: PLC0415

    covered = {case.model_type for case in (*entries(), *heads())}
    others: dict[str, str] = {}
    for name in sorted(vars(modeling_auto)):
        if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES"):
            task = name.removeprefix("MODEL_FOR_").removesuffix("_MAPPING_NAMES").lower().replace("_", " ")
            for model_type in getattr(modeling_auto, name):
                others.setdefault(model_type, f"of {task} alone")
    reasons = {}
    for model_type in configuration_auto.CONFIG_MAPPING_NAMES:
        if model_type not in covered:
            part = "no head of its own" if model_type in modeling_auto.MODEL_MAPPING_NAMES else "part of another model"
            reasons[model_type] = others.get(model_type, part)
    return reasons


def _registry(name: str) -> dict[str, str]:
    from transformers.models.auto import modeling_auto  # noqa: PLC0415

    names = getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES")
    return {model_type: each if isinstance(each, str) else each[0] for model_type, each in names.items()}
