"""Hugging Face models built or read where users do so: what each rank runs in test_pretrained.py."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from lightning_sp.models import HuggingFaceConfig
from tests.instruments.record import Record
from tests.trainer.lightning_ranks import trainer_of
from tests.trainer.tiny import VOCAB, TokenDataset, _full

SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, use_cache=False,
)  # fmt: skip


def hugging_face_config(tied: bool = False, **sizes: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**{**SIZES, **sizes}, tie_word_embeddings=tied)


def save_pretrained(folder: str, tied: bool, **sizes: int) -> None:
    """Write a tiny checkpoint as Hugging Face does."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(8)
    LlamaForCausalLM(hugging_face_config(tied, **sizes)).save_pretrained(folder)


class Attribute(nn.Module):
    """Wraps a model and holds a plain tensor, as models hold their rotary frequencies."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = torch.full((1,), 2.0)

    def forward(self, **kwargs: Any) -> Any:
        output = self.inner(**kwargs)
        output.logits = output.logits * self.scale.to(output.logits.dtype)
        return output


def build(kind: str, folder: str) -> nn.Module:
    """Build a model in one of the ways that users know."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    if kind == "from_pretrained":
        return AutoModelForCausalLM.from_pretrained(folder, use_cache=False).train()
    if kind == "bfloat16":
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, use_cache=False).train()
    if kind == "from_config":
        return AutoModelForCausalLM.from_config(hugging_face_config())
    if kind == "class":
        return LlamaForCausalLM(hugging_face_config())
    if kind == "our config":
        return HuggingFaceConfig(pretrained=folder).build()
    if kind == "attribute":
        return Attribute(LlamaForCausalLM(hugging_face_config()))
    assert kind == "load_state_dict"
    model = LlamaForCausalLM(hugging_face_config(tied="tied" in folder))
    from safetensors.torch import load_file

    state = load_file(Path(folder) / "model.safetensors")
    if "lm_head.weight" not in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


class Pretrained(pl.LightningModule):
    """Builds its model in `__init__`, `setup` or `configure_model`."""

    def __init__(self, kind: str, place: str, folder: str) -> None:
        super().__init__()
        self.kind, self.place, self.folder = kind, place, folder
        self.model: Any = build(kind, folder) if place == "__init__" else None
        self.losses = Record()
        self.first: dict[str, Tensor] = {}

    def setup(self, stage: str) -> None:
        if self.place == "setup" and self.model is None:
            self.model = build(self.kind, self.folder)

    def configure_model(self) -> None:
        if self.model is None:
            self.model = build(self.kind, self.folder)

    def on_train_start(self) -> None:
        self.first = {n: _full(p.detach()).clone() for n, p in self.named_parameters()}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Told(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def runs(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run several in one call."""
    return [run(**case) for case in cases]


def run(
    kind: str, place: str, folder: str, strategy: dict[str, Any] | None, world: int, **options: Any
) -> dict[str, Any]:
    """Fit two steps from a seed of each rank's own; what was begun with, losses and weights, or how it ended."""
    torch.manual_seed(3 + (dist.get_rank() if strategy is not None else 0))
    told = Told()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.setLevel(logging.INFO)
    logger.addHandler(told)
    module = Pretrained(kind, place, folder)
    trainer = trainer_of(strategy, world, **options)
    try:
        trainer.fit(module, DataLoader(TokenDataset(4), batch_size=2))
    except SequenceParallelError as error:
        return {"error": str(error)}
    finally:
        logger.removeHandler(told)
        logger.setLevel(logging.NOTSET)
    return {
        "error": "",
        "told": [each for each in told.messages if "holds the whole model" in each],
        "first": module.first,
        "losses": module.losses,
        "dtypes": {str(p.dtype) for p in module.parameters()},
        "weights": {n: _full(p.detach()).clone() for n, p in module.named_parameters()},
    }
