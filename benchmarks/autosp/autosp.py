"""AutoSP of DeepSpeed through its engine and Inductor, with ZeRO 1, the most that it takes."""

from __future__ import annotations

from typing import Any

import deepspeed
import deepspeed.comm
import torch
import torch.distributed as dist
from deepspeed.compile.passes.sp_compile import prepare_autosp_inputs

from benchmarks.autosp.models import LEARNING_RATE, batch_of, loss_of, made
from benchmarks.autosp.rank import Meter, compared


def train(name: str, given: dict[str, Any], meter: Meter) -> dict[str, float]:
    """Train on sequences that all ranks share; return the error of the first step's gradients."""
    deepspeed.comm.init_distributed(dist_backend="gloo", dist_init_required=False)
    model, world = made(name, given["size"]), dist.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "compile": {"deepcompile": True, "passes": ["autosp"]},
        "sequence_parallel_size": world,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.compile(compile_kwargs={"dynamic": True})
    error = 0.0
    for number, length in enumerate(given["lengths"]):
        batch = batch_of(name, length, number)
        meter.begin()
        names = [each for each in ("input_ids", "labels", "position_ids") if each in batch]
        mask = torch.ones_like(batch["input_ids"])
        ids, labels, positions, mask = prepare_autosp_inputs(
            batch["input_ids"], batch["labels"], batch.get("position_ids"), mask if name == "llama" else None
        )
        told = {"input_ids": ids, "labels": labels, "position_ids": positions}
        inputs = {each: told[each] for each in names}
        if name == "llama":  # position ids without a mask do not compile
            inputs["attention_mask"] = mask
        loss = loss_of(engine, name, inputs)
        engine.backward(loss)
        engine.step()
        whole = loss.detach().float().reshape(()) / world
        dist.all_reduce(whole)
        meter.end(float(whole))
        if number == 0:
            error = compared(
                {key: value.detach() for key, value in engine.module.named_parameters()}, given["reference"]
            )
    return {"error": error}
