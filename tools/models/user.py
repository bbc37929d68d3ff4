"""What a user writes: a LightningModule around an unmodified class of transformers; nothing of sequence parallelism in it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.models.batches import Trial
from tools.models.float64 import Float32AsFloat64
from tools.models.registry import HEADS, Case
from tools.models.shrink import tiny_config

LEARNING_RATE = 0.02
# Added to tiny random weights: without it attention is uniform, and hides faults.
NOISE = 0.1
MOST_PARAMETERS = 10_000_000


def build(case: Case) -> Any:
    """Return the model with random weights, the same on every call."""
    import transformers  # noqa: PLC0415

    model_class, config = getattr(transformers, case.class_name), tiny_config(case.model_type)
    if model_class.forward is torch.nn.Module.forward:
        raise ValueError("the class has no forward: it generates alone")
    if case.kind == "causal LM" and isinstance(text := config.get_text_config(decoder=True), model_class.config_class):
        config = text  # as AutoModelForCausalLM does
    config._experts_implementation = "eager"  # the grouped product takes no float64
    if case.kind == "causal LM" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    if case.kind in HEADS:
        # Rows of one length need no padding token, but some classes ask for one; some draw dropout where the config has no number for it.
        for each in (config, config.get_text_config(decoder=True)):
            each.pad_token_id = each.pad_token_id if getattr(each, "pad_token_id", None) is not None else 0
        config.classifier_dropout = 0.0
    with torch.device("meta"):
        num_parameters = sum(each.numel() for each in model_class(config).parameters())
    if num_parameters > MOST_PARAMETERS:
        raise ValueError(f"{num_parameters / 1e6:.0f} million parameters are left in the tiny configuration")
    torch.manual_seed(3)
    model = model_class(config)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return model


class User(pl.LightningModule):
    """Trains a model by its own loss, or by its logits and F.cross_entropy."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.form, self.wide = trial.form, trial.wide
        self.model = build(trial.case)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        with Float32AsFloat64() if self.wide else nullcontext():
            loss = self.model(**batch).loss if self.form == "own loss" else self.by_hand(dict(batch))
        self.log("train_loss", loss)
        return loss

    def by_hand(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean over the tokens with a target."""
        targets = batch.pop("shift_labels") if "shift_labels" in batch else batch.pop("targets")
        logits = self.model(**batch).logits
        if targets.dim() == 1:
            return F.cross_entropy(logits.flatten(0, -2), targets)  # VideoPrism's are (rows, 1, classes)
        if more := logits.shape[-2] - targets.shape[-1]:  # GIT's begin with its picture's
            logits = logits[..., more:, :]
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD: unlike Adam's, its step shows a gradient of the wrong size."""
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=0.9)
