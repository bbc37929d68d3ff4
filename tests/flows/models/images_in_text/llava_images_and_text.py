"""LLaVA on images and text: micro-batches without an image, in some data-parallel groups and in all."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from tests.flows.models.images_in_text.llava_images import model, with_image
from tests.flows.tiny import Tuned, rows


def main(batch_size: int, **options: Any) -> Any:
    torch.manual_seed(6)
    # Every token has a target: a mean of groups' validation losses is that of one device.
    found = [{**(row := with_image(each)), "labels": row["input_ids"]} for each in rows(number=16, length=24)]
    texts = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows(number=16, length=24)]
    samples = [*found[:2], *texts[:2], *texts[4:8], *found[4:8], *texts[8:10], *found[8:10]]
    module = Evaluated(model())
    training, validation = (
        DataLoader(each, batch_size=batch_size, collate_fn=collate)  # type: ignore[arg-type]
        for each in (samples, [*texts[10:12], *found[10:14], *texts[12:14]])
    )
    pl.Trainer(max_epochs=1, **options).fit(module, training, validation)
    return module


class Evaluated(Tuned):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = default_collate([{name: row[name] for name in ("input_ids", "labels")} for row in rows])
    if images := [row["pixel_values"] for row in rows if "pixel_values" in row]:
        batch["pixel_values"] = torch.stack(images)
    return batch
