"""What each rank runs in test_delayed_init.py: models built where users build them, until training would start."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.memory.initial_weights import set_up
from tests.parallelize.delayed_init.reading import llama
from tests.trainer.lightning_ranks import trainer_of
from tests.trainer.tiny import _full

__all__ = ["set_up", "several"]
WIDTH = 160


class Router(nn.Module):
    """Casts its layer in its forward, as routers of Switch do."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float32
        self.classifier = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.classifier = self.classifier.to(self.dtype)
        return self.classifier(x)


class Built(pl.LightningModule):
    """Builds its parts in `__init__` or in `configure_model`, of everything that a module can hold."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first = kind, {}
        self.early = llama(hidden_size=WIDTH) if kind == "begun in __init__" else None
        self.late: Any = None

    def configure_model(self) -> None:
        if self.late is not None:
            return
        late = nn.ModuleDict(
            {"embedding": nn.Embedding(WIDTH, WIDTH), "head": nn.Linear(WIDTH, WIDTH, bias=False), "router": Router()}
        )
        late["head"].weight = late["embedding"].weight
        late.register_buffer("table", torch.rand(WIDTH, WIDTH))
        late.register_buffer("unsaved", torch.rand(WIDTH, WIDTH), persistent=False)
        late.plain = torch.rand(WIDTH, WIDTH)
        late.scales = nn.ParameterList([torch.rand(3), torch.rand(WIDTH, 2 * WIDTH)])
        nn.init.xavier_normal_(late.scales[1])
        late["model"] = llama(hidden_size=WIDTH, tie_word_embeddings=True)
        if self.early is not None:
            self.early.lm_head = nn.Linear(WIDTH, 3 * WIDTH)
        self.late = late

    def on_fit_start(self) -> None:
        named = (*self.named_parameters(), *self.named_buffers(), ("plain", self.late.plain))
        self.first = {name: _full(tensor.detach()).clone() for name, tensor in named}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError("nothing is trained here")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def first_weights(strategy: dict[str, Any] | None, world: int, kind: str, **options: Any) -> dict[str, Tensor]:
    """Return the whole weights when training would start, from a seed that is rank 0's alone."""
    torch.manual_seed(3 if strategy is None or not torch.distributed.get_rank() else 99)
    module = Built(kind)
    trainer = trainer_of(strategy, world, limit_train_batches=0, **options)
    trainer.fit(module, DataLoader(TensorDataset(torch.zeros(1))))
    return module.first


def several(cases: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Run several in one call."""
    return [first_weights(**case) for case in cases]
