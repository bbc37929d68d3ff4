"""Which Hugging Face causal language model to build: by its type and sizes, or by its name or folder.

Nothing is downloaded unless a name on the hub is given as ``pretrained``. transformers is imported when a model is
built, not before: it is optional.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_sp.errors import SequenceParallelError, closest


@dataclass(frozen=True)
class HuggingFaceConfig:
    """A Hugging Face causal language model.

    Args:
        model_type: The name of an architecture that transformers knows, such as ``"llama"``: the model is built with
            fresh weights.
        options: Fields of that architecture's configuration, such as ``{"hidden_size": 128}``.
        pretrained: Instead of a model type: a folder or a name on the hub, whose weights are loaded.
    """

    model_type: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    pretrained: str | None = None

    def __post_init__(self) -> None:
        if (self.model_type is None) == (self.pretrained is None):
            raise SequenceParallelError(
                f"model_type={self.model_type!r}, pretrained={self.pretrained!r}: give one of the two, model_type for "
                "fresh weights or pretrained for those of a folder or of the hub"
            )

    def build(self) -> nn.Module:
        """Make the model. Its caches are off: with them, packed documents would see each other in training."""
        if importlib.util.find_spec("transformers") is None:
            raise SequenceParallelError(
                f"the model {self.model_type or self.pretrained!r} needs transformers, which is not installed: "
                "pip install 'lightning-sp[hf]'"
            )
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

        options = {"use_cache": False, **self.options}
        if self.pretrained is not None:
            pretrained: nn.Module = AutoModelForCausalLM.from_pretrained(self.pretrained, **options)
            return pretrained.train()
        if self.model_type not in CONFIG_MAPPING:
            raise SequenceParallelError(
                f"model_type={self.model_type!r} is no architecture of transformers"
                f"{closest(str(self.model_type), CONFIG_MAPPING.keys())}"
            )
        config = AutoConfig.for_model(self.model_type, **options)
        unknown = [name for name in self.options if name not in type(config)().to_dict()]
        if unknown:
            raise SequenceParallelError(
                f"{type(config).__name__} has no option {unknown[0]!r}{closest(unknown[0], type(config)().to_dict())}"
            )
        model: nn.Module = AutoModelForCausalLM.from_config(config)
        return model
