"""Hugging Face models with heads and losses of their own, as a user calls them: on one device, or as a rank of several."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError, SequenceParallelStrategy
from tests.instruments.record import Record
from tests.trainer.tiny import _full

VOCAB, LENGTH, PAD, STEPS = 61, 22, 60, 2
SMALL = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, max_position_embeddings=64,
    pad_token_id=PAD, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, hidden_dropout_prob=0.0, classifier_dropout=0.0,
    attention_probs_dropout_prob=0.0,
)  # fmt: skip
GPT2 = dict(
    vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    pad_token_id=PAD, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
EXPERTS = dict(
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    output_router_logits=True,
    router_aux_loss_coef=0.5,
    sliding_window=None,
)
# Name -> config class, its options, model class, what it is given.
MODELS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "bert masked": ("BertConfig", SMALL, "BertForMaskedLM", "tokens"),
    "modernbert masked": ("ModernBertConfig", {**SMALL, "global_attn_every_n_layers": 1}, "ModernBertForMaskedLM", "tokens"),
    "llama tokens": ("LlamaConfig", {**SMALL, "num_labels": 5}, "LlamaForTokenClassification", "classes of tokens"),
    "bert tokens": ("BertConfig", {**SMALL, "num_labels": 5}, "BertForTokenClassification", "classes of tokens"),
    "llama sequence": ("LlamaConfig", {**SMALL, "num_labels": 5}, "LlamaForSequenceClassification", "class"),
    "llama regression": ("LlamaConfig", {**SMALL, "num_labels": 1}, "LlamaForSequenceClassification", "number"),
    "gpt2 sequence": ("GPT2Config", {**GPT2, "num_labels": 5}, "GPT2ForSequenceClassification", "class"),
    "bert sequence": ("BertConfig", {**SMALL, "num_labels": 5}, "BertForSequenceClassification", "class"),
    "llama answers": ("LlamaConfig", SMALL, "LlamaForQuestionAnswering", "answers"),
    "bert answers": ("BertConfig", SMALL, "BertForQuestionAnswering", "answers"),
    "mixtral": ("MixtralConfig", {**SMALL, **EXPERTS}, "MixtralForCausalLM", "tokens"),
}  # fmt: skip


def samples(given: str, size: int = 4 * STEPS) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(7)
    found = []
    for index in range(size):
        length = LENGTH - (5 * index) % 13
        real = torch.arange(LENGTH) < length
        ids = torch.randint(0, PAD, (LENGTH,), generator=g).where(real, PAD)
        sample = {"input_ids": ids, "attention_mask": real.long()}
        if given == "tokens":
            sample["labels"] = ids.where(real & (torch.rand(LENGTH, generator=g) < 0.5), -100)
        elif given == "classes of tokens":
            sample["labels"] = torch.randint(0, 5, (LENGTH,), generator=g).where(real, -100)
        elif given == "class":
            sample["labels"] = torch.tensor(index % 5)
        elif given == "number":
            sample["labels"] = torch.rand((), generator=g)
        else:
            sample |= {"start_positions": torch.tensor(index), "end_positions": torch.tensor((3 * index) % LENGTH)}
        found.append(sample)
    return found


class HuggingFace(pl.LightningModule):
    """`model(**batch).loss`, and nothing else."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import transformers

        config, options, kind, _ = MODELS[name]
        self.model = getattr(transformers, kind)(getattr(transformers, config)(**options)).train()
        # Grouped products of matrices take no float64.
        self.model.set_experts_implementation("eager")
        self.losses = Record()
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.model(**batch)
        self.losses.append(float(output.loss.detach()))
        self.outputs.append(output[1].detach())
        return output.loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(name: str, strategy: dict[str, Any] | None, world: int = 1) -> dict[str, Any]:
    """Return losses, the last step's second output and final weights."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(3)
    module = HuggingFace(name)
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        precision="64-true", max_epochs=1, strategy="auto" if strategy is None else SequenceParallelStrategy(**strategy),
    )  # fmt: skip
    rows = 4 // (strategy or {}).get("data_parallel_size", 1)
    error = ""
    try:
        trainer.fit(module, DataLoader(samples(MODELS[name][3]), batch_size=rows))  # type: ignore[arg-type]
    except SequenceParallelError as refusal:
        error = str(refusal)
    weights = {n: _full(p.detach()).clone() for n, p in module.named_parameters()}
    return {
        "error": error,
        "losses": module.losses,
        "weights": weights,
        "output": module.outputs[-1] if module.outputs else None,
    }


def fits(names: list[str], strategy: dict[str, Any], world: int) -> dict[str, dict[str, Any]]:
    return {name: fit(name, strategy, world) for name in names}
