"""What each rank runs in test_compiled_loss.py; returns plain values."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.flows.tiny import Tuned, bert_sizes
from tests.trainer.lightning_ranks import trainer_of


def trained(head: str, strategy: dict[str, Any] | None, backend: str) -> dict[str, Any]:
    """Fit a BERT that its user compiled, by its own loss, which it makes by `nn.CrossEntropyLoss()`."""
    import transformers

    torch.manual_seed(5)
    model = getattr(transformers, f"BertFor{head}")(transformers.BertConfig(**bert_sizes(num_labels=3)))
    module = Tuned(model)
    if backend:
        module.model = torch.compile(model, backend=backend)
    ids = torch.randint(6, 40, (8, 18), generator=torch.Generator().manual_seed(0))
    labels = ids if head == "MaskedLM" else torch.arange(8) % 3
    loader = DataLoader(
        [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)], batch_size=4
    )
    trainer = trainer_of(strategy, torch.distributed.get_world_size() if strategy else 1)
    try:
        trainer.fit(module, loader)
    except SequenceParallelError as error:
        return {"error": str(error)}
    weights = {
        n.replace("_orig_mod.", ""): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for n, p in module.named_parameters()
    }
    return {"loss": float(trainer.callback_metrics["train_loss"]), "weights": weights, "error": ""}
