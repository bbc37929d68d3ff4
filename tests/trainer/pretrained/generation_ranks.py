"""`model.generate` inside steps: what each rank runs in test_generation.py."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.flows.tiny import VOCABULARY, llama
from tests.trainer.lightning_ranks import trainer_of
from tests.trainer.tiny import _full


class Generating(pl.LightningModule):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model, self.how = llama(), how
        self.written: list[Any] = []
        self.predicted: list[Any] = []

    def _write(self, batch: Any) -> Tensor:
        if self.how == "by name":
            return self.model.generate(
                **{k: v for k, v in batch.items() if k != "labels"}, max_new_tokens=4, do_sample=False
            )
        if self.how == "ids":
            return self.model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)
        if self.how == "sampled":
            return self.model.generate(batch["input_ids"], max_new_tokens=4, do_sample=True, top_k=5)
        if self.how == "beams":
            return self.model.generate(
                batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=3,
                num_beams=2,
                do_sample=False,
            )
        return self.model.generate(
            inputs=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=4, do_sample=False
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        if self.how == "in training":
            written = self._write(batch)
            loss = loss * (1 + written[:, -4:].double().mean())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        written = self._write(batch)
        self.written += written.tolist()
        new = written[:, batch["input_ids"].shape[1] :]
        self.log("new", new.double().mean(), batch_size=len(new), sync_dist=True)
        self.log("share", (new[:, :1] == batch["labels"][:, -1:]).double().mean(), batch_size=len(new), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._write(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(how: str, strategy: dict[str, Any] | None, world: int, length: int, micro: int = 4) -> dict[str, Any]:
    """Fit and predict under plain Lightning (None) or ours; what was written, logged and learned."""
    module = Generating(how)
    ids = torch.randint(6, VOCABULARY, (8, length + 1), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(8, length, dtype=torch.int64)
    rows = [{"input_ids": ids[i, :-1], "attention_mask": mask[i], "labels": ids[i, 1:]} for i in range(8)]
    if strategy is not None:
        strategy = {"labels_shifted": None if "global_view" in strategy else True, "global_view": "auto", **strategy}
    trainer = trainer_of(strategy, world)
    loader = DataLoader(rows, batch_size=micro)  # type: ignore[arg-type]
    try:
        trainer.fit(module, loader, loader)
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        predicted = torch.cat(trainer.predict(module, loader)).tolist()
    except SequenceParallelError as error:
        return {"error": str(error)}
    weights = {n: _full(p.detach()).clone() for n, p in module.named_parameters()}
    return {"error": "", "written": module.written, "logged": logged, "predicted": predicted, "weights": weights}
