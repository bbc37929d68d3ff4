"""A hook, of a module or of a tensor, that keeps what it reads of a gradient: what each rank runs in test_backward_hooks.py."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.trainer.lightning_ranks import trainer_of
from tests.trainer.tiny import Plain, TokenDataset, tiny_gpt


class Norms(pl.Callback):
    """Keeps the norm of the gradient of a norm's output: of all tokens by the lines that the warning names."""

    def __init__(self, of_tensor: bool) -> None:
        self.of_tensor = of_tensor
        self.own: list[float] = []
        self.whole: list[float] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        def hook(_: Any, __: Any, gradients: Any) -> None:
            strategy, gradient = trainer.strategy, gradients[0]
            if hasattr(strategy, "unshard"):
                gradient = strategy.unshard(gradient) / strategy.sequence_parallel_size
            self.own.append(float(gradients[0].norm()))
            self.whole.append(float(gradient.norm()))

        norm = pl_module.model.layers[0].attention_norm
        if self.of_tensor:
            norm.register_forward_hook(lambda *given: given[2].register_hook(lambda g: hook(None, None, [g])) and None)
        else:
            norm.register_full_backward_hook(hook)


class Hooked(Plain):
    def __init__(self) -> None:
        super().__init__(tiny_gpt)
        self.configure_model()


def fit(strategy: dict[str, Any] | None, world: int, of_tensor: bool = False) -> dict[str, Any]:
    """Fit three steps under plain Lightning (None) or ours; what the hook has kept, and what was said."""
    torch.manual_seed(3)
    norms = Norms(of_tensor)
    trainer = trainer_of(strategy, world, callbacks=[norms], max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Hooked(), DataLoader(TokenDataset(6, 29), batch_size=2))
    said = [str(each.message) for each in caught if "for the ranks' are averaged" in str(each.message)]
    return {"own": norms.own, "whole": norms.whole, "said": said}
