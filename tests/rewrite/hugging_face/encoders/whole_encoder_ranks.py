"""What each rank runs in test_whole_encoder.py, and the same on one process in plain torch; returns plain values."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.trainer.tiny import VOCAB, Plain, quiet_trainer

LENGTH = 16
SIZES = dict(
    vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.0, init_std=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=1, max_target_positions=64, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
)  # fmt: skip


def build(kind: str, tokens: int) -> nn.Module:
    """Return a model whose encoder makes so many tokens of a sound."""
    import transformers as hf

    torch.manual_seed(3)
    if kind.startswith("whisper"):
        config = hf.WhisperConfig(
            num_mel_bins=8,
            max_source_positions=tokens,
            suppress_tokens=None,
            begin_suppress_tokens=None,
            apply_spec_augment=kind == "whisper augmented",
            mask_feature_prob=0.5,
            mask_feature_length=2,
            mask_time_prob=0.0,
            **{**SIZES, "encoder_layerdrop": 0.5 if kind == "whisper that skips" else 0.0},
        )
        return hf.WhisperForConditionalGeneration(config)
    return hf.Speech2TextForConditionalGeneration(
        hf.Speech2TextConfig(input_feat_per_channel=8, max_source_positions=4 * tokens, conv_channels=16, **SIZES)
    )


class Model(Plain):
    def __init__(self, kind: str, tokens: int) -> None:
        super().__init__(None)
        self.model = build(kind, tokens)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        used = {n: p.grad for n, p in self.named_parameters() if p.grad is not None}
        self.raw_grads.append({n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in used.items()})


def rows_of(kind: str, tokens: int, rows: int = 2) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(2)
    found = []
    for row in range(rows):
        labels = torch.randint(3, VOCAB, (LENGTH,), generator=g)
        labels[LENGTH - 3 * row :] = -100
        if kind.startswith("whisper"):
            found.append({"labels": labels, "input_features": torch.randn(8, 2 * tokens, generator=g).double()})
            continue
        frames = 4 * tokens
        mask = (torch.arange(frames) < frames - 12 * row).long()
        sound = torch.randn(frames, 8, generator=g).double()
        found.append({"labels": labels, "input_features": sound, "attention_mask": mask})
    return found


def one_process(kind: str, tokens: int, **_: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    module, rows = Model(kind, tokens).double(), rows_of(kind, tokens)
    loss = module.training_step({name: torch.stack([row[name] for row in rows]) for name in rows[0]}, 0)
    loss.backward()
    return {
        "loss": float(loss.detach()),
        "grads": {n: p.grad for n, p in module.named_parameters() if p.grad is not None},
    }


def sharded(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_sharded(**case) for case in cases]


def _sharded(kind: str, tokens: int, strategy: dict[str, Any]) -> dict[str, Any]:
    module = Model(kind, tokens)
    try:
        trainer = quiet_trainer(2, strategy=strategy, max_steps=1)
        trainer.fit(module, DataLoader(rows_of(kind, tokens), batch_size=2))  # type: ignore[arg-type]
        error = ""
    except SequenceParallelError as refusal:
        error = str(refusal)
    except Exception as other:
        error = f"NOT BY NAME {other!r}: {traceback.format_exc()}"
    return {"error": error, "losses": module.losses, "grads": module.raw_grads[-1] if module.raw_grads else {}}
