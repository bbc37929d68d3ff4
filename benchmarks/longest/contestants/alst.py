"""Arctic Long Sequence Training of DeepSpeed, all of it that runs on a CPU: Ulysses in Hugging Face's model, ZeRO 3, the model's own full
checkpointing, the MLP and the loss in tiles of as many tokens as its documentation advises."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import deepspeed
import deepspeed.comm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP, UlyssesSPAttentionHF
from torch import Tensor
from transformers.models.llama import modeling_llama

from benchmarks.longest.llama import adamw, llama

# Of a tile of logits in float32: ALST's own choice in its integrations.
LOGITS_BYTES = 2**30


def build(
    variant: str, problem: dict[str, Any], rank: int, world: int, begin_part: Callable[[str], None]
) -> Callable[[Tensor], Tensor]:
    """Return a step on a sequence that all ranks share."""
    deepspeed.comm.init_distributed(dist_backend="gloo", dist_init_required=False)
    modeling_llama.LlamaMLP.forward = _tiled_mlp
    model = llama(problem, begin_part)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=world, micro_batch_size=1,
        seq_length_is_variable=True,
    )  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel_size": world,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), mpu=mpu, config=config)
    engine.train()

    def step(tokens: Tensor) -> Tensor:
        length = tokens.shape[1] - 1
        own = slice(rank * length // world, (rank + 1) * length // world)
        hidden = engine.module.model(
            input_ids=tokens[:, :-1][:, own], position_ids=torch.arange(own.start, own.stop)[None]
        ).last_hidden_state  # fmt: skip
        targets = tokens[:, 1:][:, own].contiguous()
        tiles = max(1, math.ceil(targets.numel() * problem["vocab_size"] * 4 / LOGITS_BYTES))
        head = engine.module.lm_head
        total = TiledFusedLogitsLoss.apply(_loss_of_tile, head, hidden, targets, None, tiles, [head.weight], "sum")
        loss = total / targets.numel()
        engine.backward(loss)
        engine.step()
        whole = loss.detach() / world
        dist.all_reduce(whole)
        return whole

    return step


def _loss_of_tile(head: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).float(), targets, reduction="sum")


def _tiled_mlp(self: Any, x: Tensor) -> Tensor:
    def mlp(self: Any, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out

    tiles = math.ceil(x.shape[1] / x.shape[2])
    weights = [self.down_proj.weight, self.gate_proj.weight, self.up_proj.weight]
    out: Tensor = TiledMLP.apply(mlp, self, x, tiles, weights)
    return out
