"""What runs in the ranks: a module with parameters of shape (), trained for an epoch or two, saved and resumed."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp.testing import trainer_of_ranks
from lightning_sp.weights.single_numbers import in_own_shape, mark_single_numbers
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_gpt


class Numbers(Plain):
    def __init__(self) -> None:
        super().__init__(tiny_gpt)
        self.model = tiny_gpt()
        self.model.temperature = nn.Parameter(torch.tensor(1.5))
        self.weight, self.frozen = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(1.1), requires_grad=False)

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        return super().logits(batch) / self.model.temperature

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.weight.shape == self.frozen.shape == ()
        return super().training_step(batch, batch_idx) * self.frozen * torch.exp(-self.weight) + self.weight


def fit(
    epochs: int, strategy: dict[str, Any], world: int, saved: str = "", resumed: str | None = None
) -> dict[str, Tensor]:
    """Return the whole parameters at the end of a fit.

    Args:
        epochs: in all.
        strategy: its options; of no meaning for one rank, which is plain Lightning's.
        world: ranks.
        saved: where the checkpoint goes.
        resumed: from where the run goes on.
    """
    torch.manual_seed(3)
    module = Numbers().double()  # plain Lightning loads a checkpoint before it makes a module float64
    trainer = quiet_trainer(world, strategy=strategy, max_epochs=epochs)
    if world == 1:
        trainer = pl.Trainer(
            **trainer_of_ranks(1), max_epochs=epochs, precision="64-true", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
    size = 4 // strategy.get("data_parallel_size", 1)
    trainer.fit(module, DataLoader(TokenDataset(8), batch_size=size), ckpt_path=resumed, weights_only=True)
    if saved:
        trainer.save_checkpoint(saved)
    mark_single_numbers(module)
    return {name: _whole(each) for name, each in module.named_parameters()}


def _whole(parameter: Any) -> Tensor:
    found = parameter.detach()
    return in_own_shape(found.full_tensor(), parameter) if hasattr(found, "full_tensor") else found
