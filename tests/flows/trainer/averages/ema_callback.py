"""Lightning's EMAWeightAveraging: the average is validated with, saved, resumed from, and what training ends with."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch.utils.data import DataLoader

from tests.flows.tiny import WithBuffer, rows


def main(batch_size: int, **options: Any) -> Any:
    folder = f"{options['default_root_dir']}/ema-{options['devices']}-{batch_size}-{type(options['strategy']).__name__}"
    loader, validation = DataLoader(rows(24), batch_size=batch_size), DataLoader(rows(8), batch_size=batch_size)
    again, saves = copy.deepcopy(options["strategy"]), ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    callbacks = [EMAWeightAveraging(decay=0.7), saves]
    pl.Trainer(max_epochs=2, callbacks=callbacks, **options).fit(WithBuffer(), loader, validation)
    torch.manual_seed(8)
    module, options = WithBuffer(), {**options, "strategy": again}
    trainer = pl.Trainer(max_epochs=3, callbacks=[EMAWeightAveraging(decay=0.7)], **options)
    trainer.fit(module, loader, validation, ckpt_path=f"{folder}/epoch=0.ckpt")
    return module
