"""A plain LightningModule for causal language models: loss, perplexity, AdamW, warmup and cosine.

Nothing in it knows of sequence parallelism. Its mean cross entropy is the mean over the tokens that it sees, its
metrics are torchmetrics' own: what makes them right on shards is the strategy's work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.text import Perplexity
from typing_extensions import override

from lightning_sp.errors import SequenceParallelError, check_numbers, check_whole_numbers
from lightning_sp.labels import IGNORE_INDEX
from lightning_sp.models.gpt import GPTConfig
from lightning_sp.models.hugging_face import HuggingFaceConfig
from lightning_sp.models.llama import LlamaConfig
from lightning_sp.models.schedule import warmup_cosine

# Perplexity's update makes several (tokens, vocabulary) tensors: at most this many logits go in at once.
MAX_METRIC_LOGITS = 2**24

Batch = dict[str, Tensor]
ModelConfig = LlamaConfig | GPTConfig | HuggingFaceConfig


def token_chunks(logits_BSV: Tensor, labels_BS: Tensor, *, max_logits: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views along the sequence that hold at most ``max_logits`` logits each, one token at least."""
    batch_size, _, vocab_size = logits_BSV.shape
    chunk_tokens = max(1, max_logits // max(1, batch_size * vocab_size))
    yield from zip(torch.split(logits_BSV, chunk_tokens, 1), torch.split(labels_BS, chunk_tokens, 1), strict=True)


class CausalLM(LightningModule):
    """Train a causal language model on batches of ``input_ids``, ``position_ids`` and ``shift_labels``.

    Args:
        model: What to train: a configuration, built in `configure_model` so that large models can be made on the meta
            device and sharded before they have storage; or a module, taken as it is. The module is called with
            ``input_ids`` and ``position_ids`` and returns logits, or an output that has them (Hugging Face).
        lr: Peak learning rate.
        weight_decay: AdamW's, on matrices alone.
        warmup_steps: Optimizer steps of linear warmup.
        max_steps: Optimizer steps until the cosine's end. The trainer's own ``max_steps`` when not given.
        min_lr_ratio: Learning rate at the cosine's end, as a share of ``lr``.
        betas: AdamW's.
    """

    def __init__(
        self,
        model: LlamaConfig | GPTConfig | HuggingFaceConfig | nn.Module,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 10,
        max_steps: int | None = None,
        min_lr_ratio: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        super().__init__()
        self.model_config: ModelConfig | None = None
        self.model: nn.Module | None = None
        if isinstance(model, nn.Module):
            self.model = model
        elif isinstance(model, ModelConfig):
            self.model_config = model
        else:
            raise SequenceParallelError(
                f"CausalLM(model=...) takes a LlamaConfig, a GPTConfig, a HuggingFaceConfig or a torch module, "
                f"not {type(model).__name__}"
            )
        check_numbers({"lr": lr, "weight_decay": weight_decay, "min_lr_ratio": min_lr_ratio})
        check_whole_numbers({"warmup_steps": warmup_steps}, least=0)
        if max_steps is not None:
            check_whole_numbers({"max_steps": max_steps}, least=-1)
        self.lr, self.weight_decay, self.betas = lr, weight_decay, (betas[0], betas[1])
        self.warmup_steps, self.max_steps, self.min_lr_ratio = warmup_steps, max_steps, min_lr_ratio
        self.metrics = nn.ModuleDict()
        for stage in ("val", "test"):
            self.metrics[f"{stage}_loss"] = MeanMetric()
            self.metrics[f"{stage}_perplexity"] = Perplexity(ignore_index=IGNORE_INDEX)
        self.save_hyperparameters(self._plain_hparams())

    def _plain_hparams(self) -> dict[str, Any]:
        """Numbers, strings and containers alone: a checkpoint that holds more does not load with torch's defaults."""
        names = ("lr", "weight_decay", "warmup_steps", "max_steps", "min_lr_ratio")
        hparams: dict[str, Any] = {name: getattr(self, name) for name in names}
        described = self.model_config if self.model_config is not None else self.model
        hparams["model_class"] = type(described).__name__
        if self.model_config is not None:
            hparams["model_options"] = {
                field.name: _plain(getattr(self.model_config, field.name))
                for field in dataclasses.fields(self.model_config)
            }
        return hparams

    @override
    def configure_model(self) -> None:
        """Build the model if it was given as a configuration. Lightning calls this for every fit, validate, test."""
        if self.model is None:
            assert self.model_config is not None
            self.model = self.model_config.build()

    @override
    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return logits.

        Shapes: (B, S), (B, S) -> (B, S, V).
        """
        if self.model is None:
            raise SequenceParallelError(
                "CausalLM was called before its model was built: call configure_model() first, or let the Trainer do it"
            )
        output = self.model(input_ids=input_ids, position_ids=position_ids)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        return logits

    def _loss(self, logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
        return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), ignore_index=IGNORE_INDEX)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross entropy of the batch's labelled tokens."""
        logits_BSV = self(batch["input_ids"], batch["position_ids"])
        loss = self._loss(logits_BSV, batch["shift_labels"])
        self.log("train_loss", loss, prog_bar=True, batch_size=batch["input_ids"].shape[0])
        return loss

    def _evaluate(self, batch: Batch, *, stage: str) -> None:
        """Log token-weighted loss and perplexity.

        The loss is weighted by this rank's labelled tokens. Under sequence parallelism it is the same number on all
        ranks of the batch, and their tokens add up to the batch's: the mean is exact whatever the layout.
        """
        logits_BSV, labels_BS = self(batch["input_ids"], batch["position_ids"]), batch["shift_labels"]
        num_tokens = labels_BS.ne(IGNORE_INDEX).sum()
        loss, perplexity = self.metrics[f"{stage}_loss"], self.metrics[f"{stage}_perplexity"]
        assert isinstance(loss, MeanMetric)
        assert isinstance(perplexity, Perplexity)
        loss.update(self._loss(logits_BSV, labels_BS), weight=num_tokens)
        for logits, labels in token_chunks(logits_BSV, labels_BS, max_logits=MAX_METRIC_LOGITS):
            perplexity.update(logits, labels)
        for name, metric in ((f"{stage}_loss", loss), (f"{stage}_perplexity", perplexity)):
            self.log(name, metric, prog_bar=True, on_step=False, on_epoch=True, batch_size=labels_BS.shape[0])

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``val_loss`` and ``val_perplexity``."""
        self._evaluate(batch, stage="val")

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``test_loss`` and ``test_perplexity``."""
        self._evaluate(batch, stage="test")

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return each token's log-probability of its label, 0 where it has none.

        Shapes: ``{"log_probs": (B, S)}``.
        """
        logits_BSV = self(batch["input_ids"], batch["position_ids"])
        labels_BS = batch["shift_labels"]
        losses = F.cross_entropy(
            logits_BSV.flatten(0, 1), labels_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
        )
        return {"log_probs": -losses.view_as(labels_BS)}

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW, decaying matrices alone, with linear warmup and a cosine stepped at every optimizer step."""
        # Not trainer.estimated_stepping_batches: read here, it makes a resume drop the loader's state (Lightning 21765).
        max_steps = self.max_steps if self.max_steps is not None else self.trainer.max_steps
        if max_steps <= 0:
            raise SequenceParallelError(
                f"max_steps={self.max_steps}, Trainer(max_steps={self.trainer.max_steps}): the cosine needs its end; "
                "give CausalLM(max_steps=...) or Trainer(max_steps=...)"
            )
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=self.betas)
        factor = warmup_cosine(warmup_steps=self.warmup_steps, max_steps=max_steps, min_ratio=self.min_lr_ratio)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _plain(value: Any) -> Any:
    """Turn mappings and sequences of any kind (OmegaConf's too) into dicts and lists."""
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
