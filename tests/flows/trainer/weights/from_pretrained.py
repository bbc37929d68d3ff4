"""from_pretrained in __init__, save_pretrained of whole weights, read again by transformers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


def main(batch_size: int, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    folder = f"{options['default_root_dir']}/start"
    torch.manual_seed(5)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        llama().save_pretrained(folder)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    samples = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows()]
    module = Tuned(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64))
    trainer = pl.Trainer(max_epochs=1, **options)
    trainer.fit(module, DataLoader(samples, batch_size=batch_size))
    ours = hasattr(trainer.strategy, "whole_state_dict")
    state = trainer.strategy.whole_state_dict(module.model) if ours else module.model.state_dict()
    end = f"{options['default_root_dir']}/end"
    if trainer.is_global_zero:
        module.model.save_pretrained(end, state_dict=state)
    trainer.strategy.barrier()
    again = AutoModelForCausalLM.from_pretrained(end, dtype=torch.float64)
    logits = again(rows(2)[0]["input_ids"][None]).logits
    return module, {"logits": logits.detach()}
