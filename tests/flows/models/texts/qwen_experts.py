"""Qwen3-MoE: a mixture of experts, some without a token on a rank."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, rows, sizes


def main(batch_size: int, **options: Any) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    samples = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for i, row in enumerate(rows())]
    module = Tuned(
        Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **sizes(
                    num_experts=8,
                    num_experts_per_tok=2,
                    moe_intermediate_size=16,
                    head_dim=8,
                    experts_implementation="eager",
                )
            )
        )
    )
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
