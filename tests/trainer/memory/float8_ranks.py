"""What each rank runs in test_float8.py; returns plain values."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_sp.errors import SequenceParallelError
from lightning_sp.models import Llama, LlamaConfig
from lightning_sp.testing import trainer_of_ranks
from tests.trainer.tiny import VOCAB, Plain, TokenDataset, _full, quiet_trainer

# Query, output, gate, up and down; of two key-value heads the projections have 64 features, too few.
PER_BLOCK = 5


def llama() -> nn.Module:
    """Return a Llama whose matrices are large enough."""
    sizes = dict(dim=128, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=256)
    return Llama(LlamaConfig(vocab_size=VOCAB, **sizes))


def hugging_face() -> nn.Module:
    """Return transformers' own."""
    from transformers import LlamaConfig as Config
    from transformers import LlamaForCausalLM

    sizes = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(Config(vocab_size=VOCAB, intermediate_size=256, use_cache=False, **sizes))


def converted(build: Any, recipe: str) -> nn.Module:
    """Return a model of which a user has made the same layers float8's, by a recipe of torchao's."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    model = build()

    def large(module: Any, name: str) -> bool:
        return "head" not in name and min(module.in_features, module.out_features) >= 128

    return convert_to_float8_training(model, module_filter_fn=large, config=config)  # type: ignore[no-any-return]


class User(Plain):
    """Trains one of them."""

    def logits(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        out = super().logits(batch) if isinstance(self.model, Llama) else None
        return out if out is not None else self.model(batch["input_ids"], position_ids=batch["position_ids"]).logits


BUILDS = {"llama": llama, "hugging face": hugging_face}


def fit(
    world: int,
    strategy: dict[str, Any] | None,
    build: str = "llama",
    recipe: str = "",
    data: dict[str, Any] | None = None,
    rows: int = 2,
    **options: Any,
) -> dict[str, Any]:
    """Fit three steps; return losses, gradients, weights and how many layers are float8's, or the refusal.

    Args:
        world: ranks.
        strategy: its options; None for plain Lightning.
        build: of `BUILDS`.
        recipe: by which the user has converted the model; none for a plain one.
        data: of `TokenDataset`.
        rows: of a batch.
        options: of the Trainer.
    """
    torch.manual_seed(3)
    module = User(partial(converted, BUILDS[build], recipe) if recipe else BUILDS[build])
    options = {"max_steps": 3, **options}
    if strategy is None:
        warnings.filterwarnings("ignore")
        quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer = pl.Trainer(**trainer_of_ranks(1), **quiet, precision="64-true", max_epochs=1, **options)
    else:
        trainer = quiet_trainer(world, strategy=strategy, **options)
    try:
        trainer.fit(module, DataLoader(TokenDataset(**{"size": 12, "length": 32, **(data or {})}), batch_size=rows))
    except SequenceParallelError as refusal:
        return {"refused": str(refusal)}
    return {
        "losses": module.losses,
        "grads": module.raw_grads,
        "weights": {n: _full(p.detach()).clone() for n, p in module.named_parameters()},
        "layers": sum(type(each).__name__ == "Float8Linear" for each in module.modules()),
    }


def fits(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit several in one call."""
    return [fit(**case) for case in cases]
