"""AutoSP of DeepSpeed through its engine and Inductor, with ZeRO 1, the most that it takes. It loses the targets at the edges of shards.

Its step is not divided into parts: hooks would break the graph that it compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import deepspeed.comm
import torch
import torch.distributed as dist
from deepspeed.compile.passes.sp_compile import prepare_autosp_inputs
from torch import Tensor

from benchmarks.longest.llama import adamw, llama


def build(
    variant: str, problem: dict[str, Any], rank: int, world: int, begin_part: Callable[[str], None]
) -> Callable[[Tensor], Tensor]:
    """Return a step on a sequence that all ranks share."""
    deepspeed.comm.init_distributed(dist_backend="gloo", dist_init_required=False)
    model = llama(problem)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "compile": {"deepcompile": True, "passes": ["autosp"]},
        "sequence_parallel_size": world,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
    engine.compile(compile_kwargs={"dynamic": True})

    def step(tokens: Tensor) -> Tensor:
        ids = tokens[:, :-1].contiguous()
        positions = torch.arange(ids.shape[1])[None]
        inputs = prepare_autosp_inputs(ids, ids.clone(), positions, torch.ones_like(ids))
        names = ("input_ids", "labels", "position_ids", "attention_mask")
        loss = engine(**dict(zip(names, inputs, strict=True))).loss
        engine.backward(loss)
        engine.step()
        whole = loss.detach().float().reshape(()) / world
        dist.all_reduce(whole)
        return whole

    return step
