"""Tries what users do around a model, each script of tests/flows, and writes docs/flows.md.

    python -m tools.flows              every flow
    python -m tools.flows dpo lora     those whose name holds one of the words; the other rows stay
    python -m tools.flows --workers 2  so many at a time, each with worlds of its own
    python -m tools.flows --precision bf16-mixed
                                       the exact ones in another precision: prints which are refused there, and leaves the page as it is

Owns the order of the work; flows, runs and the page are in its siblings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.pool import ThreadPool
from threading import local
from typing import Any

from tqdm import tqdm

from tools.flows.page import PAGE, read_page, row_of, write_page
from tools.flows.registry import Flow, flows
from tools.flows.worlds import alarms
from tools.flows.worlds import answer as outcome
from tools.models.worlds import Pools, Worlds


def main(words: Sequence[str], num_workers: int, limit_s: float, precision: str | None) -> None:
    """Run the flows chosen, then write the page.

    Args:
        words: a flow is chosen when its name holds one of them; none: every flow.
        num_workers: flows at a time.
        limit_s: of one run of a flow.
        precision: of the Trainer, to look for false alarms in it; None: write the page.
    """
    every = flows()
    chosen = [flow for flow in every if not words or any(word in flow.name for word in words)]
    if not chosen:
        raise SystemExit(f"no flow's name holds {' or '.join(words)}; there are: {', '.join(f.name for f in every)}")
    found = {(row.topic, row.name): row for row in (read_page(PAGE.read_text()) if PAGE.exists() else [])}
    if precision is not None:
        chosen = [f for f in chosen if (row := found.get((f.topic, f.name))) is not None and row.outcome == "exact"]
        answers = dict(_each(chosen, num_workers, limit_s, lambda pools, flow: alarms(pools, flow, precision)))
        others = {flow.name: answer for flow, answer in answers.items() if answer["outcome"] != "ran"}
        print(f"{len(answers)} flows that are exact in float64, in {precision}: {len(others)} do not run")
        for name, answer in others.items():
            print(f"{name}: {answer['outcome']}: {answer['why']}")
        return
    for flow, answer in _each(chosen, num_workers, limit_s, outcome):
        found[flow.topic, flow.name] = row_of(flow, answer)
    write_page([found[flow.topic, flow.name] for flow in every if (flow.topic, flow.name) in found])
    print(f"wrote {PAGE}")


def _each(
    chosen: Sequence[Flow], num_workers: int, limit_s: float, ask: Callable[[Pools, Flow], dict[str, Any]]
) -> Iterator[tuple[Flow, dict[str, Any]]]:
    """Yield each flow with its answer, as they come."""
    mine, opened = local(), []

    def run(flow: Flow) -> tuple[Flow, dict[str, Any]]:
        if not hasattr(mine, "worlds"):
            mine.worlds = Worlds(limit_s)
            opened.append(mine.worlds)
        return flow, ask(mine.worlds, flow)

    with ThreadPool(num_workers) as pool:
        progress = tqdm(pool.imap_unordered(run, chosen), total=len(chosen), file=sys.stdout)
        for flow, answer in progress:
            progress.set_postfix_str(f"{flow.name}: {answer['outcome']}")
            yield flow, answer
    for worlds in opened:
        worlds.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="a part of a flow's name; none: every flow")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="flows at a time; 2")
    parser.add_argument(
        "--limit", type=float, default=120.0, metavar="S", help="seconds that one run of a flow may take; 120"
    )
    parser.add_argument("--precision", help="of the Trainer, to look for false alarms in it: 32-true, bf16-mixed")
    arguments = parser.parse_args()
    main(arguments.words, arguments.workers, arguments.limit, arguments.precision)
