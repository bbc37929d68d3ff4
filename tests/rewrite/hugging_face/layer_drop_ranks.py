"""What each rank runs in test_layer_drop.py; returns plain values."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.flows.tiny import sizes
from tests.instruments.record import Record
from tests.trainer.lightning_ranks import trainer_of

SIZES = dict(
    d_model=32, encoder_layers=4, decoder_layers=4, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32,
    decoder_ffn_dim=32, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=2, max_position_embeddings=64,
)  # fmt: skip


class Translator(pl.LightningModule):
    """M2M100, which skips layers; which of them ran is noted."""

    def __init__(self, layerdrop: float) -> None:
        super().__init__()
        from transformers import M2M100Config, M2M100ForConditionalGeneration

        config = M2M100Config(
            vocab_size=sizes()["vocab_size"], encoder_layerdrop=layerdrop, decoder_layerdrop=layerdrop, **SIZES
        )
        self.model = M2M100ForConditionalGeneration(config)
        self.ran: list[list[int]] = []
        self.losses = Record()
        layers: list[nn.Module] = [*self.model.model.encoder.layers, *self.model.model.decoder.layers]
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, number=number: self.ran[-1].append(number))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.ran.append([])
        loss = self.model(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def trained(strategy: dict[str, Any] | None, rows: int, layerdrop: float, options: dict[str, Any]) -> dict[str, Any]:
    """Fit four micro-batches; return the losses, the layers that ran in each run of the step, and the error if there is one."""
    torch.manual_seed(5)
    module = Translator(layerdrop)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(6, 40, (16, 16), generator=generator)
    samples = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.flip(0)[:12]} for row in ids]
    world = torch.distributed.get_world_size() if strategy else 1
    try:
        trainer_of(strategy, world, limit_train_batches=4, **options).fit(module, DataLoader(samples, batch_size=rows))
    except SequenceParallelError as refusal:
        return {"error": str(refusal)}
    return {"losses": module.losses[-4:], "ran": module.ran[-4:], "tried": module.ran[:-4], "error": ""}


def refused() -> str:
    """Train a model whose file draws by Python's random numbers; return the refusal."""
    from unittest import mock

    from lightning_sp.rewrite.hugging_face import layer_drop

    with mock.patch.object(layer_drop, "_source", return_value="layerdrop random.uniform(0, 1)"):
        try:
            trainer_of({"ring_size": 2}, 2, max_steps=1).fit(
                Translator(0.5),
                DataLoader([{"input_ids": torch.arange(6, 22), "labels": torch.arange(6, 18)}] * 4, batch_size=2),
            )
        except SequenceParallelError as error:
            return str(error)
    return "not refused"
