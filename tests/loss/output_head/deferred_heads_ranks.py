"""What each rank runs in test_deferred_heads.py: fits with logits that wait and with logits that are made; returns plain values."""

from __future__ import annotations

import traceback
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp import linear_cross_entropy
from tests.loss.most_tokens import MostTokens
from tests.trainer.tiny import VOCAB, Plain, TokenDataset, quiet_trainer, tiny_gpt, tiny_llama

DIM, LAYERS = 32, 2


def _hugging_face(kind: str = "llama", **options: Any) -> nn.Module:
    import transformers

    sizes = dict(
        vocab_size=VOCAB, hidden_size=DIM, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        use_cache=False,
    )  # fmt: skip
    if kind == "gemma2":
        config = transformers.Gemma2Config(**sizes, head_dim=8, final_logit_softcapping=3.0, **options)
        return transformers.Gemma2ForCausalLM(config)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **options))


MODELS: dict[str, Any] = {
    "gpt": lambda: tiny_gpt(num_layers=LAYERS),
    "llama": lambda: tiny_llama(num_layers=LAYERS),
    "tied": lambda: _hugging_face(tie_word_embeddings=True),
    "untied": lambda: _hugging_face(tie_word_embeddings=False),
    "softcap": lambda: _hugging_face("gemma2"),
}


class User(Plain):
    """What users do with logits in a step."""

    def __init__(self, model: str, step: str) -> None:
        super().__init__(MODELS[model])
        self.of_hugging_face, self.step = model in ("tied", "untied", "softcap"), step
        self.seen: list[float] = []
        self.left: Tensor | None = None

    def configure_model(self) -> None:
        super().configure_model()
        if self.step == "frozen_head":
            self.model.get_output_embeddings().requires_grad_(False)

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        if not self.of_hugging_face:
            return super().logits(batch)
        return self.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        output = getattr(self, f"_{self.step}", self._by_hand)(batch)
        loss = output["loss"] if isinstance(output, dict) else output
        self.losses.append(float(loss.detach()))
        return output

    def _by_hand(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten())

    def _own(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(
            **{name: batch[name] for name in ("input_ids", "position_ids")},
            labels=batch["shift_labels"],
            shift_labels=batch["shift_labels"],
        ).loss

    def _public(self, batch: dict[str, Tensor]) -> Tensor:
        states = self.model.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).last_hidden_state
        return linear_cross_entropy(
            states,
            self.model.lm_head,
            batch["shift_labels"],
            chunk_tokens=self.trainer.strategy.config.loss_chunk_tokens or 99,
        )

    def _metrics(self, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = self.logits(batch), batch["shift_labels"]
        self.seen += [float((logits.argmax(-1) == labels).sum()), float(logits.detach().logsumexp(-1).sum())]
        if self.global_rank == 0:  # alone: no other rank may have to answer
            self.seen.append(float(logits.softmax(-1)[0, 0, 0]))
        return F.cross_entropy(logits.movedim(-1, 1), labels, label_smoothing=0.1) + 1e-3 * self._penalty(logits)

    def _penalty(self, logits: Tensor) -> Tensor:
        from lightning_sp.reductions import batch_mean

        return batch_mean(logits.logsumexp(-1).square())

    def _left(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self.left = self.logits(batch)
        return {"loss": F.cross_entropy(self.left.flatten(0, 1), batch["shift_labels"].flatten()), "logits": self.left}

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        if self.left is not None:  # of the weights before the optimizer's step
            self.seen += [float(outputs["logits"].double().square().sum()), float(self.left.detach().square().sum())]
            self.seen.append(float(self.left.detach().logsumexp(-1).double().sum()))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._by_hand(batch), batch_size=len(batch["input_ids"]))


def fits(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run several in one call."""
    return [fit(**case) for case in cases]


def fit(
    model: str,
    step: str,
    chunk_tokens: int | str | None,
    world: int = 2,
    strategy: Any = None,
    size: int = 4,
    **options: Any,
) -> dict[str, Any]:
    """Fit a model and return losses, raw gradients, what a user has seen, and of how many tokens the most logits were."""
    torch.manual_seed(3)
    user, most = User(model, step), MostTokens(VOCAB, DIM)
    loader = DataLoader(TokenDataset(size), batch_size=2)
    options = dict(strategy={"preflight": False, **(strategy or {}), "loss_chunk_tokens": chunk_tokens}, **options)
    trainer = quiet_trainer(world, limit_val_batches=1, **options)
    try:
        with most:
            trainer.fit(user, loader, loader)
    except Exception:
        return {"error": traceback.format_exc()}
    shown = [float(trainer.callback_metrics["val_loss"])]
    return {
        "error": "",
        "losses": user.losses + shown,
        "grads": user.raw_grads,
        "seen": user.seen,
        "tokens": most.tokens,
    }
