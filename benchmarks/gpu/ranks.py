"""Ranks of NCCL that share one GPU: what users do, trained by several of them and by the device alone; options; and the golden run."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import Any

import numpy as np

from benchmarks.gpu.part import Case, Part, Row, Setting
from tests.golden.ranks import train
from tests.trainer.tiny import fit
from tools.flows.registry import Flow, flows
from tools.flows.worlds import alarms, answer
from tools.models.worlds import Pools, Worlds

# In the order of their value: one for each way of doing things comes first, the others behind them.
FIRST = (
    "nanogpt", "dpo", "lora", "nanogpt_by_hand", "resume", "qwen_experts", "bert_questions", "manual_optimization",
    "flattening_collator", "whisper", "llava_images_and_text", "metrics", "own_checkpointing", "distillation",
    "torch_decoder", "best_checkpoint", "adafactor", "hidden_states", "model_in_configure_model", "gemma_windows", "ema_callback",
)  # fmt: skip
# (data-parallel groups, ring, ulysses).
GOLDEN = ((1, 2, 2), (2, 1, 2), (1, 4, 1))
# Of the strategy, on two ranks; beside a layout whichever it names.
_RING, _ULYSSES = {"ring_size": 2}, {"ulysses_size": 2}
OPTIONS: tuple[dict[str, Any], ...] = (
    {**_RING, "ring_method": "all_gather"},
    {**_RING, "ring_saves_kv": True},
    {**_ULYSSES, "ulysses_stages": 2},
    {**_ULYSSES, "ulysses_stages": 2, "stage_inputs": "recomputed"},
    {**_RING, "activation_checkpointing": "full", "activation_offload": "host", "activation_loading_horizon": 1},
    {**_RING, "activation_checkpointing": "selective"},
    {**_RING, "mlp_tile_tokens": 8},
    {**_ULYSSES, "compile": True},
    {**_RING, "compile": True},
    {**_RING, "global_view": True},
    {**_RING, "shard_size": 1},
    {**_RING, "cpu_offload": True},
    {"tensor_parallel_size": 2},
)
# Flows at a time: to start a world, and to wait for a message, leaves the device and most cores idle.
_WORKERS, _LIMIT_S = 8, 90.0

Ask = Callable[[Pools], Row]


def flow_row(flow: Flow, pools: Pools) -> Row:
    """Run a flow on one rank by plain Lightning, and on several under the strategy, in float64."""
    found = answer(pools, flow)
    said: Row = {"outcome": found["outcome"], "why": str(found.get("why", ""))[:300]}
    if found["outcome"] == "crash":
        said["where"] = found.get("where", "")[-2500:]
    return said if found["outcome"] == "not compared" else {"right": found["outcome"] == "exact", **said}


def alarm_row(flow: Flow, precision: str, pools: Pools) -> Row:
    """Run a flow under the strategy in a precision of training: the preflight compares there what the fused kernels compute."""
    found = alarms(pools, flow, precision, ("ulysses 2", "ring 2"))
    return {"right": found["outcome"] == "ran", "outcome": found["outcome"], "why": str(found.get("why", ""))[:300]}


def golden_row(layout: tuple[int, int, int], pools: Pools) -> Row:
    """Train the golden run on several ranks and on one; a GPU draws other weights than a CPU, whose losses are stored."""
    found, alone = (pools(d * r * u).run(train, (d, r, u))[0] for d, r, u in (layout, (1, 1, 1)))
    error = max(abs(found["losses"][step] - loss) for step, loss in alone["losses"].items())
    return {"right": error <= 1e-8, "outcome": f"{len(alone['losses'])} losses, largest difference {error:.1e}"}


def trained(num_ranks: int, strategy: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Train a tiny Llama on the ranks that run; return losses and weights on the host."""
    found = fit("llama", num_ranks, strategy, {}, **options)
    weights = {name.replace("_orig_mod.", ""): tensor.cpu().numpy() for name, tensor in found["weights"].items()}
    return {"losses": found["losses"], "weights": weights}


def option_row(strategy: dict[str, Any], pools: Pools) -> Row:
    """Train under options of the strategy on two ranks, and on one without, in float64."""
    [alone] = pools(1).run(trained, 1, {}, {})
    found = pools(2).run(trained, 2, strategy, {})[0]
    error = max(float(np.abs(found["weights"][name] - whole).max()) for name, whole in alone["weights"].items())
    return {"right": error <= 1e-10, "outcome": f"weights differ by {error:.1e}"}


def gathers_row(strategy: dict[str, Any], pools: Pools) -> Row:
    """Train in bf16-mixed with weights gathered in bfloat16 and in float32: bit by bit the same."""
    narrow, wide = (
        pools(2).run(trained, 2, {**strategy, "gather_dtype": dtype}, {"precision": "bf16-mixed"})[0]
        for dtype in ("auto", "float32")
    )
    other = [name for name, weight in wide["weights"].items() if not np.array_equal(weight, narrow["weights"][name])]
    return {"right": not other and narrow["losses"] == wide["losses"], "outcome": f"{len(other)} weights differ"}


def _in_workers(asked: dict[str, Ask], setting: Setting) -> dict[str, Future[Row]]:
    """Begin to answer all, some at a time, each worker in worlds of its own."""
    waiting: queue.SimpleQueue[tuple[Future[Row], Ask]] = queue.SimpleQueue()
    found: dict[str, Future[Row]] = {name: Future() for name in asked}
    for name, ask in asked.items():
        waiting.put((found[name], ask))

    def serve() -> None:
        with Worlds(_LIMIT_S, setting.device) as worlds:
            while True:
                try:
                    future, ask = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    future.set_result(ask(worlds))
                except Exception as error:
                    future.set_result({"error": f"{type(error).__name__}: {str(error)[-1500:]}"})

    for _ in range(1 if setting.tiny else _WORKERS):
        Thread(target=serve, daemon=True).start()
    return found


def _asked(setting: Setting) -> dict[str, Ask]:
    by_name = {flow.name: flow for flow in flows()}
    if setting.tiny:
        return {f"option {OPTIONS[0]}": partial(option_row, OPTIONS[0])}
    asked: dict[str, Ask] = {}
    for name in FIRST[:8]:
        asked[name] = partial(flow_row, by_name[name])
        asked[f"bf16-mixed: {name}"] = partial(alarm_row, by_name[name], "bf16-mixed")
    asked |= {f"option {each}": partial(option_row, each) for each in OPTIONS}
    asked |= {f"gather_dtype, {each}": partial(gathers_row, each) for each in (_RING, _ULYSSES)}
    asked |= {f"golden, dp {d} ring {r} ulysses {u}": partial(golden_row, (d, r, u)) for d, r, u in GOLDEN}
    asked |= {f"32-true: {name}": partial(alarm_row, by_name[name], "32-true") for name in FIRST[:3]}
    return asked | {name: partial(flow_row, by_name[name]) for name in [*FIRST[8:], *sorted({*by_name} - {*FIRST})]}


def _ranks(setting: Setting) -> Iterator[Case]:
    asked, begun = (
        {name: ask for name, ask in _asked(setting).items() if setting.asks_for(name)},
        dict[str, Future[Row]](),
    )

    def wait_for(name: str) -> Row:
        if not begun:
            begun.update(_in_workers(asked, setting))
        return begun[name].result()

    for name in asked:
        yield name, partial(wait_for, name)


RANKS = Part("ranks of NCCL that share the device, beside the device alone", 240, _ranks)
