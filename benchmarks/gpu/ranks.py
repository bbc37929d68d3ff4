"""Ranks of NCCL that share one GPU: what users do, trained by several of them and by the device alone, in float64; and the golden losses."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from threading import Thread

from benchmarks.gpu.part import Case, Part, Row, Setting
from tests.golden.ranks import train
from tools.flows.registry import Flow, flows
from tools.flows.worlds import answer
from tools.models.worlds import Pools, Worlds

# In the order of their value: one for each way of doing things comes first, the others behind them.
FIRST = (
    "nanogpt", "t5_translation", "lora", "nanogpt_by_hand", "resume", "dpo", "qwen_experts", "bert_questions", "manual_optimization",
    "flattening_collator", "ema_callback", "whisper", "llava_images_and_text", "metrics", "own_checkpointing", "distillation",
    "torch_decoder", "best_checkpoint", "adafactor", "hidden_states", "model_in_configure_model", "gemma_windows",
)  # fmt: skip
# (data-parallel groups, ring, ulysses).
GOLDEN = ((1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 1, 2), (1, 4, 1))
# Flows at a time: to start a world, and to wait for a message, leaves the device and most cores idle.
_WORKERS, _LIMIT_S = 6, 90.0
_TINY = ("metrics",)

Ask = Callable[[Pools], Row]


def flow_row(flow: Flow, pools: Pools) -> Row:
    """Run a flow on one rank by plain Lightning, and on several under the strategy."""
    found = answer(pools, flow)
    said: Row = {"outcome": found["outcome"], "why": str(found.get("why", ""))[:300]}
    return said if found["outcome"] == "not compared" else {"right": found["outcome"] == "exact", **said}


def golden_row(layout: tuple[int, int, int], pools: Pools) -> Row:
    """Train the golden run on several ranks and on one; a GPU draws other weights than a CPU, whose losses are stored."""
    found, alone = (pools(d * r * u).run(train, (d, r, u))[0] for d, r, u in (layout, (1, 1, 1)))
    error = max(abs(found["losses"][step] - loss) for step, loss in alone["losses"].items())
    return {"right": error <= 1e-8, "outcome": f"{len(alone['losses'])} losses, largest difference {error:.1e}"}


def _in_workers(asked: dict[str, Ask], setting: Setting) -> dict[str, Future[Row]]:
    """Begin to answer all, some at a time, each worker in worlds of its own."""
    waiting: queue.SimpleQueue[tuple[Future[Row], Ask]] = queue.SimpleQueue()
    found: dict[str, Future[Row]] = {name: Future() for name in asked}
    for name, ask in asked.items():
        waiting.put((found[name], ask))

    def serve() -> None:
        with Worlds(_LIMIT_S, setting.device) as worlds:
            while not waiting.empty():
                future, ask = waiting.get()
                try:
                    future.set_result(ask(worlds))
                except Exception as error:
                    future.set_exception(error)

    for _ in range(1 if setting.tiny else _WORKERS):
        Thread(target=serve, daemon=True).start()
    return found


def _ranks(setting: Setting) -> Iterator[Case]:
    by_name = {flow.name: flow for flow in flows()}
    names = _TINY if setting.tiny else dict.fromkeys([*(name for name in FIRST if name in by_name), *by_name])
    layouts = GOLDEN[:1] if setting.tiny else GOLDEN
    asked: dict[str, Ask] = {
        f"golden, dp {d} ring {r} ulysses {u}": partial(golden_row, (d, r, u)) for d, r, u in layouts
    }
    asked |= {name: partial(flow_row, by_name[name]) for name in names}
    begun: dict[str, Future[Row]] = {}

    def wait_for(name: str) -> Row:
        if not begun:
            begun.update(_in_workers(asked, setting))
        return begun[name].result()

    for name in asked:
        yield name, partial(wait_for, name)


RANKS = Part("ranks of NCCL that share the device, beside the device alone: float64, three layouts each", 240, _ranks)
